"""Metadata of rows: by global index (BatchMeta) and by key (KVBatchMeta)."""

from rl_transferqueue.compat.metadata.batch_meta import BatchMeta, extract_field_schema
from rl_transferqueue.compat.metadata.kv_batch_meta import KVBatchMeta

__all__ = ["BatchMeta", "KVBatchMeta", "extract_field_schema"]
