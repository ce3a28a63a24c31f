"""Bodies of the requests that load and unload LoRA adapters."""

from typing import Annotated

import msgspec

NotEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter: as vLLM has it, and the base model, where the mesh has several."""

    lora_name: str = ""
    lora_path: str = ""
    """Directory on the machines of the workers."""
    load_inplace: bool = False
    """Take the place of the adapter that has this name."""
    is_3d_lora_weight: bool = False
    base_model_name: str | None = None
    """The model that the adapter changes; may be left out where one model's workers serve adapters."""


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter: as vLLM has it; its own number of the adapter is not needed."""

    lora_name: str = ""
    lora_int_id: int | None = None


class RegisterAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /adapters: SageMaker's words for loading."""

    name: NotEmpty
    src: NotEmpty
    """Directory on the machines of the workers."""
    preload: bool = True
    """An adapter is loaded before it is announced, whatever is asked for."""
    pin: bool = False
    """No adapter is kept in a worker when its room is needed; those that are asked for come back."""

    def without_effect(self) -> list[str]:
        """Names of the parameters that ask for something else than what is done."""
        return [name for name, is_asked in (("preload", not self.preload), ("pin", self.pin)) if is_asked]
