"""The applications: each a class with the members of ``evidence.application.Application``, by its name."""

from __future__ import annotations

import importlib
from typing import Any

from evidence.application import EvidenceError

CLASSES = {
    "image": ("evidence.applications.image", "Image"),
    "image_keras": ("evidence.applications.image_keras", "ImageKeras"),
    "language": ("evidence.applications.language", "Language"),
    "transformer": ("evidence.applications.transformer", "TransformerLanguage"),
    "speech": ("evidence.applications.speech", "Speech"),
    "transformer_short": ("evidence.applications.transformer", "ShortTransformer"),
    "speech_short": ("evidence.applications.speech", "ShortSpeech"),
}
"""Name -> module and class. Modules are imported when they are asked for: each rank loads one framework."""


def application_class(name: str) -> Any:
    """The class of an application.

    Raises:
        EvidenceError: there is none of this name, or it cannot be imported.
    """
    if name not in CLASSES:
        raise EvidenceError(f"there is no application {name!r}; there are {', '.join(CLASSES)}")
    module, attribute = CLASSES[name]
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise EvidenceError(f"{name!r} needs {error.name}: install it (make setup installs everything)") from error
