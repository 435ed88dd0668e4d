"""The data plane in fifteen lines: one process puts rows, another reads them by name."""

import multiprocessing

from rl_protocol import BatchData, dense, ragged
from rl_transferqueue import PlaneDescriptor, TransferQueueConfig, connect_blocking, start_local_plane


def produce(descriptor):
    rows = BatchData({"responses": ragged([[5, 6, 7], [8]], "int64"), "score": dense([1.0, 0.0])})
    with connect_blocking(PlaneDescriptor.from_json(descriptor)) as client:
        client.put("train", ["a", "b"], rows, tags=[{"step": 1}, {"step": 1}])


if __name__ == "__main__":
    with start_local_plane(TransferQueueConfig(capacity_mb=64)) as plane:
        producer = multiprocessing.get_context("spawn").Process(target=produce, args=(plane.descriptor.to_json(),))
        producer.start()
        with connect_blocking(plane.descriptor) as client:
            meta = client.wait_ready("train", count=2, fields=["responses", "score"], where={"step": 1}, timeout_s=60)
            batch = client.get(meta, ["responses"])  # only this column moves: views of shared memory
            print(meta.keys, [row.tolist() for row in batch.ragged("responses").rows()])
        producer.join(60)
