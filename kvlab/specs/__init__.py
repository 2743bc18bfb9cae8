"""What each part of a layer caches, in exact integers. Standard library only."""
