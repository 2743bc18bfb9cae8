"""Who holds which page: the pool, the block tables. Standard library only."""

from kvlab.cache.manager import KVCacheManager
from kvlab.cache.pool import NULL_BLOCK, BlockPool

__all__ = ["NULL_BLOCK", "BlockPool", "KVCacheManager"]
