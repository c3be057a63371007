"""The model that vLLM's worker has loaded: what its settings came to, and whether its weights are still those that were
loaded.

vLLM hands a connector no model. It is found among the objects of the process: the module that holds the attention
layers, which the configuration lists.
"""

import functools
import gc
import hashlib
import inspect
import sys
import weakref
from pathlib import Path
from typing import Any

import torch

from .settings import named

SAMPLES = 64  # Elements of a tensor that are compared, spread over all of it.
# The model's own code comes with vLLM, whose version is in the space. Any other is known by its text.
PACKAGES = ("vllm", "torch", "terrace_kv", "builtins")
REMOTE = "transformers_modules"  # What comes with a model is loaded below it.
OF_ADAPTERS = "vllm.lora."  # Layers that are put around the model's, and compute the same without an adapter.
# How far compiling has come, which depends on what an earlier start left in vLLM's cache.
NOT_SETTINGS = ("training", "compiled", "first_compile", "was_aot_compile_fn_loaded_from_disk", "do_not_compile")
NOT_SETTINGS += ("evaluate_guards", "layerwise_nvtx_tracing_enabled")


def model_of(config: Any) -> torch.nn.Module | None:
    """The outermost module that holds all attention layers of this configuration."""
    layers = config.compilation_config.static_forward_context.values()
    wanted = {id(layer) for layer in layers if isinstance(layer, torch.nn.Module)}
    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    holding = [(sum(1 for _ in m.modules()), m) for m in modules if wanted and wanted <= {id(i) for i in m.modules()}]
    return max(holding, key=lambda found: found[0], default=(0, None))[1]


def of_object(value: Any) -> dict[str, Any]:
    """What switches and scales an object: no whole numbers, which are sizes and ranks, no paths, nothing private."""
    found = {}
    for name, attribute in sorted(vars(value).items()):
        if name.startswith("_") or name in NOT_SETTINGS:
            continue
        is_text = isinstance(attribute, str) and "/" not in attribute
        is_class = isinstance(attribute, type) and attribute.__module__.startswith("vllm.")
        if is_text or is_class or isinstance(attribute, bool | float | torch.dtype):
            found[name] = named(attribute)
    return found


def of_module(module: torch.nn.Module) -> list[Any]:
    found = of_object(module)
    for name in ("impl", "quant_method", "scheme"):  # The attention backend, and how a layer is quantized.
        if (part := vars(module).get(name)) is not None:
            found[name] = [named(type(part)), of_object(part)]
    return [named(type(module)), found]


def code_of(model: torch.nn.Module) -> list[str]:
    """Digests of the code that did not come with vLLM, and versions of packages of which the layers are."""
    names = {type(module).__module__ for module in model.modules()}
    names |= {name for name in sys.modules if name.startswith(REMOTE + ".")}
    found = set()
    for name in names:
        package, module = name.partition(".")[0], sys.modules.get(name)
        if package == "transformers" and (parent := sys.modules.get(package)):
            found.add(f"{package} {parent.__version__}")
        elif package not in PACKAGES and module is not None and getattr(module, "__file__", None):
            found.add(hashlib.sha256(Path(inspect.getfile(module)).read_bytes()).hexdigest())
    return sorted(found)


def resolved(model: torch.nn.Module) -> dict[str, Any]:
    layers, adapters = {}, {}
    for name, module in model.named_modules():
        of_adapters = type(module).__module__.startswith(OF_ADAPTERS)
        (adapters if of_adapters else layers)[name.replace(".base_layer", "")] = of_module(module)
    return {"layers": layers, "adapters": adapters, "code": code_of(model)}


class Weights:
    """Whether a model's weights are as they were, as far as that can be seen from samples of all of its tensors, and
    from calls that replace them. vLLM tells nobody: trainers write to tensors, or call the model's own loader.
    `samples` is False where vLLM itself moves weights around while it runs."""

    def __init__(self, model: torch.nn.Module, samples: bool = True) -> None:
        self._model = model
        self._samples = samples
        self._parameters = [module._parameters for module in model.modules()]
        self._loads: list[bool] = []  # Not empty: the loader was called.
        self._watch()
        self.renew()

    def _watch(self) -> None:
        load, loads, model = getattr(type(self._model), "load_weights", None), self._loads, weakref.ref(self._model)
        if load is None:
            return

        @functools.wraps(load)
        def watched(*args: Any, **kwargs: Any) -> Any:
            loads.append(True)
            return load(model(), *args, **kwargs)

        self._model.load_weights = watched  # type: ignore[assignment]

    def renew(self) -> None:
        """What they are now is what they are compared with."""
        self._loads.clear()
        self._known = self._fingerprint()

    def changed(self) -> bool:
        return bool(self._loads) or self._fingerprint() != self._known

    @torch.inference_mode()
    def _fingerprint(self) -> bytes:
        if not self._samples:
            return b""
        samples: dict[Any, list[torch.Tensor]] = {}
        places = []
        for parameters in self._parameters:
            for parameter in parameters.values():
                if parameter is None or parameter.is_meta or not parameter.numel():
                    continue
                tensor = parameter.data
                count = tensor.numel()
                places.append(tensor.data_ptr())
                if type(tensor) is not torch.Tensor:
                    continue
                if tensor.element_size() == 1:
                    tensor = tensor.view(torch.uint8)  # Kinds that not every operation knows.
                if not tensor.is_contiguous():  # It may repeat elements.
                    size = tensor.untyped_storage().nbytes() // tensor.element_size()
                    count = min(count, size - tensor.storage_offset())
                taken = min(SAMPLES, count)
                # As it lies in memory, whatever the order of its dimensions.
                sample = tensor.as_strided((taken,), (count // taken,), tensor.storage_offset())
                samples.setdefault((tensor.dtype, tensor.device), []).append(sample)
        digest = hashlib.sha256(repr(places).encode())
        for parts in samples.values():
            digest.update(torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes())
        return digest.digest()
