"""``pytorch_model.bin``: pickles that would run code or take any amount of memory, and damaged ones."""

from __future__ import annotations

import io
import pickle
import re
import tarfile
import zipfile

# Its effect is visible from outside, because the converter reads pickles in a separate process.
COMMAND, OPEN = "touch ../outside/ran", "open('../outside/ran', 'w')"


def text(value: str) -> bytes:
    """Opcodes that push a string."""
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def call(name: str, *arguments: str | bytes) -> bytes:
    """Opcodes that call ``module.name`` with texts, or with what the opcodes of an argument push."""
    module, _, name = name.rpartition(".")
    pushed = (text(value) if isinstance(value, str) else value for value in arguments)
    return b"c" + f"{module}\n{name}\n".encode() + b"(" + b"".join(pushed) + b"tR"


def stored(pushes: bytes, name: str = "w") -> bytes:
    """A pickle of {name: the pushed value}. torch does not know the opcode ``I``: numbers are rewritten."""
    return b"\x80\x02}" + text(name) + re.sub(rb"I(-?\d+)\n", _number, pushes) + b"s."


def _number(found: re.Match[bytes]) -> bytes:
    if found[1] == b"00":
        return b"\x89"
    return b"\x8a\x09" + int(found[1]).to_bytes(9, "little", signed=True)


def zipped(data: bytes, compression: int = zipfile.ZIP_STORED, **others: bytes) -> bytes:
    """A file in torch's current format with this pickle; in names of other records ``__`` means a slash."""
    buffer = io.BytesIO()
    records = {"archive__data.pkl": data, "archive__version": b"3\n", "archive__byteorder": b"little"}
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in (records | {"archive__data__0": bytes(16)} | others).items():
            archive.writestr(name.replace("__", "/"), content)
    return buffer.getvalue()


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
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    start = [0x1950A86A20F9469CFC6C, 1001, system]
    return b"".join(pickle.dumps(part, 2) for part in start) + stored(pushes) + pickle.dumps(["0"], 2)


def tensor(
    numel: int = 4, shape: str = "(I4\nt", stride: str = "(I1\nt", offset: int = 0, key: str = "0"
) -> bytes:
    """Opcodes that push a float32 tensor over a storage of the archive."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu")
    rest = f"I{numel}\ntQI{offset}\n{shape}{stride}I00\n".encode() + b"ccollections\nOrderedDict\n(tR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR"


EVIL = call("os.system", COMMAND)
GOOD = zipped(stored(tensor()))
PAYLOADS = [
    EVIL,
    *(
        call(*words)
        for words in (
            *(("builtins.eval", OPEN), ("builtins.__import__", "evil"), ("modeling_evil.Model",)),
            *(("runpy.run_path", "../source/evil.py"), ("io.open", "../outside/ran", "w")),
            *(("shutil.rmtree", "../outside"), ("pickle.loads", "cos\nsystem\n(S'x'\ntR.")),
            *(("torch.load", "../source/pytorch_model.bin"), ("torch.hub.load", "../source", "model")),
            *(("torch._ops.load_library", "../source/evil.so"), ("operator.attrgetter", "system")),
            ("functools.partial", b"cos\nsystem\n", COMMAND),
            ("builtins.getattr", b"cos\n__dict__\n", "system"),
            ("copyreg._reconstructor", b"cevil\nModel\n", b"cbuiltins\nobject\n", b"N"),
            ("socket.create_connection", b"(" + text("127.0.0.1") + b"I9\nt"),
            *(("torch.ByteTensor", b"I1000000000000\n"), ("builtins.bytearray", b"I1000000000000\n")),
        )
    ),
    # Other opcodes that call
    b"\x80\x04\x8c\x02os\x8c\x06system\x93(" + text(COMMAND) + b"tR",
    b"ctorch\nserialization.os.system\n(" + text(COMMAND) + b"tR",
    b"(" + text(COMMAND) + b"ios\nsystem\n",
    b"(cos\nsystem\n" + text(COMMAND) + b"o",
    b"csubprocess\nPopen\n(" + text(COMMAND) + b"t\x81",
    b"csubprocess\nPopen\n(" + text(COMMAND) + b"t}\x92",
    b"ccollections\nOrderedDict\n(tR}" + text("__class__") + b"cos\nsystem\nsb",
    b"ctorch\nTensor\n}" + text("__setstate__") + b"cos\nsystem\nsb",
    *(b"\x82\x01", b"Pos.system\n", text("os.system") + b"Q"),
    b"(" + text("storage") + b"cos\nsystem\n" + text("0") + text("cpu") + b"I4\ntQ",
    b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\ncos\nsystem\n(" + text(COMMAND) + b"tNtR",
    # Tensors that are elsewhere, or claim what they do not store
    tensor().replace(text("cpu"), text("cuda:0")),
    tensor(key="../../outside/secret.json"),
    *(tensor(numel) for numel in (10**12, -1)),
    *(tensor(4, shape) for shape in ("(I1000000000000\nt", "(I-4\nt")),
    *(tensor(4, "(I4\nt", stride) for stride in ("(I1000000000000000000\nt", "(I-1\nt")),
    tensor(4, "(I1000000\nI1000000\nt", "(I0\nI0\nt"),
    tensor(offset=10**12),
]
TRAINING = [zipped(stored(stored(pushes)[2:-1], "state_dict")) for pushes in PAYLOADS]
"""``checkpoint.ckpt``: the same in the checkpoint of a training program."""
STREAMS = [
    *(b"", b".", b"\x80\x02X\xff\xff\xff\xff.", b"\x80\xff}.", b"\x80\x02h\xff.", b"\x80\x02}I1\nI2\ns."),
    *(b"\x80\x04" + frame + (1 << 60).to_bytes(8, "little") + b"." for frame in (b"\x8e", b"\x95")),
    b"I" + b"9" * 1_000_000 + b"\n.",
    b"\x80\x02" + b"(" * 1_000_000 + b".",
    b"\x80\x02]" + b"2\x86" * 60 + b".",
]
FILES = [
    GOOD,
    zipped(stored(EVIL)),
    *(zipped(stored(pushes)) for pushes in PAYLOADS[1:]),
    *(stored(pushes) for pushes in PAYLOADS[::8]),
    *(legacy(pushes) for pushes in (EVIL, PAYLOADS[2], tensor(10**12))),
    *STREAMS,
    *map(zipped, STREAMS),
    zipped(stored(tensor()), **{"..__..__outside__ran": b"x"}),
    zipped(stored(tensor()), **{"archive__constants.pkl": stored(EVIL), "archive__code__evil.py": b"evil"}),
    zipped(stored(tensor(4 << 20, "(I4194304\nt")), zipfile.ZIP_DEFLATED, archive__data__0=bytes(16 << 20)),
    *(GOOD[:-30], GOOD[:-6] + b"\xff\xff\xff\x7f\0\0"),
    tarred(storages=stored(EVIL), tensors=stored(EVIL), pickle=stored(EVIL)),
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
]
