"""Wire format of BatchData: encode and decode batches, or plan a payload and write it in place."""

from rl_protocol.wire.format import (
    ALIGN,
    MAGIC,
    MAX_ROWS,
    Buffer,
    ColumnHeader,
    Header,
    aligned,
    decode,
    encode,
    lay_out,
    plan,
    plan_rows,
    read_payload,
    write_payload,
)

__all__ = [
    "ALIGN",
    "MAGIC",
    "MAX_ROWS",
    "Buffer",
    "ColumnHeader",
    "Header",
    "aligned",
    "decode",
    "encode",
    "lay_out",
    "plan",
    "plan_rows",
    "read_payload",
    "write_payload",
]
