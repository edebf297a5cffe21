"""pytorch_model.bin: pickles that would run code or allocate any amount of memory, and damaged pickles."""

# ruff: noqa: ARG001 -- every case gets a random generator, whether it uses it or not
from __future__ import annotations

import io
import pickle
import re
import tarfile
import zipfile
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile import mutate

WEIGHTS = "pytorch_model.bin"
# Its effect is visible from outside, because the converter reads pickles in a separate process.
COMMAND = b"touch ../outside/ran"


def text(value: bytes) -> bytes:
    """Opcodes that push a string."""
    return b"X" + len(value).to_bytes(4, "little") + value


def call(module: str, name: str, *arguments: bytes) -> bytes:
    """Opcodes that call ``module.name`` with the values that the arguments' opcodes push."""
    return b"c" + f"{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def stored(pushes: bytes) -> bytes:
    """A pickle of {"w": the pushed value}; torch does not know the opcode ``I``, so numbers are rewritten."""
    return b"\x80\x02}" + text(b"w") + re.sub(rb"I(-?\d+)\n", _number, pushes) + b"s."


def _number(found: re.Match[bytes]) -> bytes:
    if found[1] == b"00":
        return b"\x89"
    return b"\x8a\x09" + int(found[1]).to_bytes(9, "little", signed=True)


def zipped(data: bytes, compression: int = zipfile.ZIP_STORED, **others: bytes) -> bytes:
    """A file in torch's current format with this pickle; in names of other records ``__`` means a slash."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        for name, content in others.items():
            archive.writestr(name.replace("__", "/"), content)
    return buffer.getvalue()


def tensor(
    numel: int = 4, shape: str = "(I4\nt", stride: str = "(I1\nt", offset: int = 0, key: bytes = b"0"
) -> bytes:
    """Opcodes that push a float32 tensor over a storage of the archive."""
    storage = (
        b"("
        + text(b"storage")
        + b"ctorch\nFloatStorage\n"
        + text(key)
        + text(b"cpu")
        + f"I{numel}\nt".encode()
        + b"Q"
    )
    rest = f"I{offset}\n{shape}{stride}I00\n".encode() + b"ccollections\nOrderedDict\n(tR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR"


GOOD = zipped(stored(tensor()), archive__data__0=bytes(16))
GADGETS: dict[str, bytes] = {
    "os.system": call("os", "system", text(COMMAND)),
    "posix.system": call("posix", "system", text(COMMAND)),
    "subprocess.Popen": call("subprocess", "Popen", text(COMMAND), b"I0\nN\x4e\x4e\x4e\x4e\x89\x88"),
    "eval": call("builtins", "eval", text(b"open('../outside/ran', 'w')")),
    "exec": call("builtins", "exec", text(b"open('../outside/ran', 'w')")),
    "eval of Python 2": call("__builtin__", "eval", text(b"open('../outside/ran', 'w')")),
    "os.mkdir": call("os", "mkdir", text(b"../outside/ran")),
    "compile": call("builtins", "compile", text(b"1"), text(b"evil.py"), text(b"exec")),
    "import": call("builtins", "__import__", text(b"evil")),
    "importlib": call("importlib", "import_module", text(b"evil")),
    "the source's module": call("evil", "Model"),
    "modeling_evil.Model": call("modeling_evil", "Model"),
    "runpy": call("runpy", "run_path", text(b"../source/evil.py")),
    "open for writing": call("builtins", "open", text(b"../outside/ran"), text(b"w")),
    "io.open": call("io", "open", text(b"../outside/ran"), text(b"w")),
    "pathlib": call("pathlib", "PosixPath", text(b"../outside/ran")),
    "shutil.rmtree": call("shutil", "rmtree", text(b"../outside")),
    "socket": call("socket", "create_connection", b"(" + text(b"127.0.0.1") + b"I9\nt"),
    "webbrowser": call("webbrowser", "open", text(b"http://127.0.0.1:9/")),
    "pickle.loads": call("pickle", "loads", text(b"cos\nsystem\n(S'x'\ntR.")),
    "torch.load": call("torch", "load", text(b"../source/pytorch_model.bin")),
    "torch.hub.load": call("torch.hub", "load", text(b"../source"), text(b"model")),
    "torch.jit.load": call("torch.jit", "load", text(b"../source/pytorch_model.bin")),
    "torch.ops.load_library": call("torch._ops", "load_library", text(b"../source/evil.so")),
    "ctypes.CDLL": call("ctypes", "CDLL", text(b"../source/evil.so")),
    "operator.attrgetter": call("operator", "attrgetter", text(b"system")),
    "functools.partial": call("functools", "partial", b"cos\nsystem\n", text(COMMAND)),
    "getattr": call("builtins", "getattr", b"cos\n__dict__\n", text(b"system")),
    "copyreg": call("copyreg", "_reconstructor", b"cevil\nModel\n", b"cbuiltins\nobject\n", b"N"),
    "copyreg.__newobj__": call("copyreg", "__newobj__", b"cevil\nModel\n"),
    "numpy": call("numpy.core.multiarray", "_reconstruct", b"cnumpy\nndarray\n", b"(I0\nt", text(b"b")),
    "numpy.load": call("numpy", "load", text(b"../source/evil.npy"), b"N\x88"),
    "a name with dots": b"\x80\x04" + b"\x8c\x02os" + b"\x8c\x06system" + b"\x93(" + text(COMMAND) + b"tR",
    "nested name": b"ctorch\nserialization.os.system\n(" + text(COMMAND) + b"tR",
    "INST": b"(" + text(COMMAND) + b"ios\nsystem\n",
    "OBJ": b"(cos\nsystem\n" + text(COMMAND) + b"o",
    "NEWOBJ": b"csubprocess\nPopen\n(" + text(COMMAND) + b"t\x81",
    "NEWOBJ_EX": b"csubprocess\nPopen\n(" + text(COMMAND) + b"t}\x92",
    "BUILD": b"ccollections\nOrderedDict\n(tR}" + text(b"__class__") + b"cos\nsystem\nsb",
    "BUILD of a function": b"ctorch._utils\n_rebuild_tensor_v2\n}" + text(b"__code__") + b"Nsb",
    "BUILD of torch.Tensor": b"ctorch\nTensor\n}" + text(b"__setstate__") + b"cos\nsystem\nsb",
    "EXT1": b"\x82\x01",
    "EXT4": b"\x84\xff\xff\xff\x7f",
    "PERSID": b"Pos.system\n",
    "BINPERSID of a text": text(b"os.system") + b"Q",
    "a storage of another kind": b"("
    + text(b"storage")
    + b"cos\nsystem\n"
    + text(b"0")
    + text(b"cpu")
    + b"I4\ntQ",
    "a storage on cuda": tensor().replace(text(b"cpu"), text(b"cuda:0")),
    "a storage by path": tensor(key=b"../../outside/secret.json"),
    "numel 10^12": tensor(10**12),
    "numel -1": tensor(-1),
    "shape 10^12": tensor(4, "(I1000000000000\nt"),
    "shape -4": tensor(4, "(I-4\nt"),
    "stride 10^18": tensor(4, "(I4\nt", "(I1000000000000000000\nt"),
    "stride -1": tensor(4, "(I4\nt", "(I-1\nt"),
    "expanded": tensor(4, "(I1000000\nI1000000\nt", "(I0\nI0\nt"),
    "offset 10^12": tensor(offset=10**12),
    "offset -1": tensor(offset=-1),
    "torch.ByteTensor of 1 TB": call("torch", "ByteTensor", b"I1000000000000\n"),
    "bytearray of 1 TB": call("builtins", "bytearray", b"I1000000000000\n"),
    "Size of a list": call("torch", "Size", b"(I1\nI2\nl"),
    "_rebuild_parameter": b"ctorch._utils\n_rebuild_parameter\n(" + tensor() + b"I00\nNtR",
    "_rebuild_sparse_tensor": call(
        "torch._utils", "_rebuild_sparse_tensor", b"ctorch\nsparse_coo\n", b"(NNN", b"t"
    ),
    "_rebuild_meta_tensor": call(
        "torch._utils",
        "_rebuild_meta_tensor_no_storage",
        b"ctorch\nfloat32\n",
        b"(I9\nt",
        b"(I1\nt",
        b"I00\n",
    ),
    "_rebuild_from_type_v2": b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\ncos\nsystem\n("
    + text(COMMAND)
    + b"tNtR",
    "a number": b"I1\n",
    "itself": b"}q\x00" + text(b"a") + b"h\x00s",
    "a class": b"ctorch\nTensor\n",
}
STREAMS: dict[str, bytes] = {
    "empty": b"",
    "only STOP": b".",
    "no STOP": b"\x80\x02}",
    "text of 4 GB": b"\x80\x02X\xff\xff\xff\xff.",
    "bytes of 2^60": b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b".",
    "frame of 2^60": b"\x80\x04\x95" + (1 << 60).to_bytes(8, "little") + b".",
    "a long integer of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "deep": b"\x80\x02" + b"(" * 1_000_000 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 300_000 + b".",
    "memo missing": b"\x80\x02h\xff.",
    "memo of 2^32": b"\x80\x02}r\xff\xff\xff\xff.",
    "doubled lists": b"\x80\x02]" + b"2\x86" * 60 + b".",
    "protocol 255": b"\x80\xff}.",
    "a list": b"\x80\x02].",
    "an empty dict": b"\x80\x02}.",
    "numbers by name": b"\x80\x02}I1\nI2\ns.",
}


def file(content: bytes) -> Any:
    """A ``.bin`` file with this content instead of safetensors."""

    def make(folder: Path, rng: Random) -> None:
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / WEIGHTS).write_bytes(content)

    return make


def archive(**records: bytes) -> bytes:
    return zipped(stored(tensor()), archive__data__0=bytes(16), **records)


def bomb(size: int) -> bytes:
    """A tensor of compressed zeros."""
    return zipped(
        stored(tensor(size // 4, f"(I{size // 4}\nt")), zipfile.ZIP_DEFLATED, archive__data__0=bytes(size)
    )


def tarred(**members: bytes) -> bytes:
    """A file in torch's first format."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def legacy(pushes: bytes) -> bytes:
    """A file in torch's format before 1.6: magic number, version, system, the pickle, the storages' keys."""
    start = [
        0x1950A86A20F9469CFC6C,
        1001,
        {"protocol_version": 1001, "little_endian": True, "type_sizes": {}},
    ]
    return b"".join(pickle.dumps(part, 2) for part in start) + stored(pushes) + pickle.dumps(["0"], 2)


EVIL = call("os", "system", text(COMMAND))
EXAMPLES: dict[str, Any] = {
    "good": file(GOOD),
    **{name: file(zipped(stored(pushes), archive__data__0=bytes(16))) for name, pushes in GADGETS.items()},
    **{
        f"{name}, no archive": file(stored(GADGETS[name]))
        for name in ("os.system", "eval", "import", "INST", "BUILD")
    },
    **{f"{name}, legacy": file(legacy(GADGETS[name])) for name in ("os.system", "os.mkdir", "numel 10^12")},
    **{f"stream: {name}": file(content) for name, content in STREAMS.items()},
    **{f"record: {name}": file(zipped(content)) for name, content in STREAMS.items()},
    "TorchScript": file(
        archive(archive__constants__pkl=b"", archive__code____torch____evil__py=b"import os")
    ),
    "constants.pkl": file(archive(**{"archive__constants.pkl": stored(EVIL)})),
    "code/": file(archive(**{"archive__constants.pkl": b"\x80\x02).", "archive__code__evil.py": b"evil"})),
    "a record ../": file(archive(**{"..__..__outside__ran": b"x"})),
    "a record /": file(archive(__tmp__ran=b"x")),
    "a zip bomb of 64 MB": lambda folder, rng: file(bomb(64 << 20))(folder, rng),
    "cut": file(GOOD[:-30]),
    "a directory beyond": file(GOOD[:-6] + b"\xff\xff\xff\x7f\0\0"),
    "a tar of evil": file(tarred(storages=stored(EVIL), tensors=stored(EVIL), pickle=stored(EVIL))),
    "a tar that leads out": file(
        tarred(**{"..__outside__ran": b"x", "storages": b"", "tensors": b"", "pickle": b""})
    ),
    "HTML": file(b"<!DOCTYPE html><html>Not found</html>"),
    "a pointer of Git LFS": file(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
}


def vary(folder: Path, rng: Random) -> None:
    choice = rng.randrange(4)
    if choice == 0:
        content = mutate.worse_bytes(GOOD, rng)
    elif choice == 1:
        content = zipped(
            mutate.worse_bytes(stored(rng.choice(list(GADGETS.values()))), rng), archive__data__0=bytes(16)
        )
    elif choice == 2:
        content = zipped(
            stored(b"".join(rng.choices(list(GADGETS.values()), k=3))), archive__data__0=bytes(16)
        )
    else:
        content = mutate.worse_bytes(legacy(tensor()), rng)
    file(content)(folder, rng)
