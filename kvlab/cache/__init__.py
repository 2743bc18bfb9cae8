"""Who holds which page: the pool, the block tables. Standard library only."""

from kvlab.cache.manager import KVCacheManager, Restart
from kvlab.cache.pool import NULL_BLOCK, BlockPool
from kvlab.cache.prefix import PrefixOptions
from kvlab.specs.rollback import RollbackPolicy

__all__ = ["NULL_BLOCK", "BlockPool", "KVCacheManager", "PrefixOptions", "Restart", "RollbackPolicy"]
