"""`asyncflow train`, which also writes down by name every class and function in the messages that Ray carries for it.

python inspected_train.py NAMES.json train CONFIG --set ...
"""

import io
import json
import pickle
import sys
from pathlib import Path

import ray._private.serialization as rays

from mindspeed_asyncflow.cli import main

sent: set[str] = set()
received: set[str] = set()


class Noting(pickle.Unpickler):
    def __init__(self, data, names):
        super().__init__(io.BytesIO(data))
        self.names = names

    def find_class(self, module, name):
        self.names.add(f"{module}.{name}")
        return super().find_class(module, name)


def note(data, names):
    try:
        Noting(bytes(data), names).load()
    except pickle.UnpicklingError as error:  # memory beside the message: an array that was not taken apart
        names.add(f"{type(error).__name__}: {error}")


class Watched(rays.Pickle5SerializedObject):
    def __init__(self, metadata, inband, *rest):
        note(inband, sent)
        super().__init__(metadata, inband, *rest)


def unpack(data):
    inband, buffers = unpack_pickle5_buffers(data)
    note(inband, received)
    return inband, buffers


if __name__ == "__main__":
    unpack_pickle5_buffers = rays.unpack_pickle5_buffers
    rays.unpack_pickle5_buffers, rays.Pickle5SerializedObject = unpack, Watched
    status = main(sys.argv[2:])
    Path(sys.argv[1]).write_text(json.dumps({"sent": sorted(sent), "received": sorted(received)}))
    raise SystemExit(status)
