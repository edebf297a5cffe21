"""Builds the stand-in for the CUDA libraries that an environment's onnxruntime-gpu asks for.

The environment's Python runs it, and it needs gcc: python build.py FOLDER
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

RUNTIME = Path(__file__).with_name("runtime.c")
NAMES = rb"(?<=\0)(?:__cuda|cuda|cu|cublas|cublasLt|cudnn|cufft|curand)[A-Z]\w*(?=\0)"
LIBRARIES = rb"(?<=\0)libcu(?:blas|blasLt|da|dart|dnn|fft|rand)\.so\.\d+(?=\0)"
NOTHING = "int {}(void) {{ return 0; }}\n"
HANDLE = "int {}(void **handle) {{ *handle = calloc(1, 512); return 0; }}\n"
TEXT = 'const char *{}(void) {{ return "an error of the stand-in"; }}\n'


def body(name: str) -> str:
    if re.search("Error(String|Name)$|StatusString$", name):
        return TEXT
    handle = re.search("Create", name) or name in ("cudaDeviceGetDefaultMemPool", "cudaLibraryLoadData")
    return HANDLE if handle and not name.startswith("cudnnBackend") else NOTHING


def main(folder: Path) -> None:
    """Writes one library, and links with the names of the others to it."""
    folder.mkdir(parents=True, exist_ok=True)
    onnxruntime = find_spec("onnxruntime")
    assert onnxruntime
    assert onnxruntime.origin
    provider = (Path(onnxruntime.origin).parent / "capi/libonnxruntime_providers_cuda.so").read_bytes()
    libraries = {name.decode() for name in re.findall(LIBRARIES, provider)}
    major = max(name.rsplit(".", 1)[1] for name in libraries if name.startswith("libcudart."))
    written = RUNTIME.read_text(encoding="utf-8")
    names = {name.decode() for name in re.findall(NAMES, provider)} - set(re.findall(r"\w+(?=\()", written))
    source = written + "".join(body(name).format(name) for name in sorted(names))
    library = folder / "libstand_in.so"
    words = ["gcc", "-O1", "-w", "-fPIC", "-shared", f"-DCUDA_MAJOR={major}", "-o", library, "-xc", "-"]
    subprocess.run(words, input=source, check=True, text=True)
    # From 1.27 on, onnxruntime opens cuDNN when it needs it.
    for name in {*libraries, "libcudnn.so", "libcudnn.so.9"}:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(library.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
