"""The base class of all parts of a backend config, which reports all mistakes at once."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticUndefined

from ..common.errors import find_alike
from ..common.secret_names import names_secret
from .values import describe_value, refuse_values

Keys = tuple[str, ...]

_PRIVATE: Final = frozenset(
    ("username", "user", "clientid", "key", "sshkey", "account", "computebudgetaccount")
)
"""Keys of accounts and credentials, beside those whose names mark them as secret."""


def config_key(
    name: str, means: str, default: object = PydanticUndefined, *, also: str = ""
) -> Any:
    """Declare a key of a section.

    Args:
        name: as documents have it.
        means: the sentence in the reference.
        default: the value without the key; a text is written as in a document. None given: the key
            is required.
        also: another name, read with a warning.
    """
    other = AliasChoices(name, also) if also else None
    return Field(
        default, alias=name, validation_alias=other, description=means, validate_default=True
    )


class ConfigSection(BaseModel):
    """A mapping of the document with fixed keys.

    Its `ValidationError` holds all mistakes below it, including those between keys, which pydantic
    alone would report only if each single key is right. With the project folder as the context of
    the validation, files that keys name have to exist.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        model_title_generator=lambda model: model.__name__.removesuffix("Config"),
    )

    FOREIGN: ClassVar[Mapping[str, str]] = {}
    """Unsupported keys that people expect here, and the message for each."""

    HINTS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Other names in lower case, and the keys that they may stand for."""

    @classmethod
    def key_names(cls) -> list[str]:
        """Return the keys that this mapping may have, as written in documents."""
        keys: list[str] = []
        for field in cls.model_fields.values():
            if isinstance(field.validation_alias, AliasChoices):
                keys += [each for each in field.validation_alias.choices if isinstance(each, str)]
            elif field.alias:
                keys.append(field.alias)
        return keys

    @classmethod
    def between(cls, data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:  # noqa: ARG003
        """Yield mistakes that involve several keys of `data`; values are as written."""
        yield from ()

    @classmethod
    def missing(
        cls,
        data: Mapping[str, Any],  # noqa: ARG003
        project: Path,  # noqa: ARG003
    ) -> Iterator[tuple[Keys, str]]:
        """Yield mistakes about files that `data` names, in a project folder; values as written."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _tell_all(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            keys = ", ".join(cls.key_names())
            refuse_values(
                [((), f"has to be a mapping with keys out of {keys}; found {describe_value(data)}")]
            )
        known = cls.key_names()
        unknown = [key for key in data if key not in known]
        empty = [key for key in data if key in known and data[key] is None]
        found: list[tuple[Keys, str]] = [((key,), cls._about_unknown(key)) for key in unknown]
        found += [
            ((key,), "is empty (null); give it a value, or leave out the key if it is optional")
            for key in empty
        ]
        found += cls.between(data)
        if info.context is not None:
            found += cls.missing(data, info.context)
        part = None
        try:
            part = handler({key: data[key] for key in data if key in known})
        except ValidationError as error:
            # A mistake in a name of a mapping has its key and "[key]".
            raised = [
                (tuple(str(key) for key in each["loc"] if key != "[key]"), each)
                for each in error.errors()
            ]
            found += [
                (keys, cls._words(each))
                for keys, each in raised
                # An extra one is the second name of a key, which `between` reports.
                if not (keys and keys[0] in empty) and each["type"] != "extra_forbidden"
            ]
        refuse_values(found)
        assert part is not None, "pydantic refused without a mistake"
        return part

    @classmethod
    def _words(cls, error: ErrorDetails) -> str:
        """Return the message of a mistake that pydantic found, without its "Value error, "."""
        if error["type"] == "missing":
            key = error["loc"][-1]
            means = next(f.description for f in cls.model_fields.values() if f.alias == key)
            return f"is missing, and there is no default: add {key}: … ({str(means).rstrip('.')})"
        return str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]

    @classmethod
    def _about_unknown(cls, key: str) -> str:
        if key in cls.FOREIGN:
            return cls.FOREIGN[key]
        plain = key.lower().replace("_", "").replace("-", "")
        if names_secret(key) or plain in _PRIVATE:
            return (
                "credentials and accounts are not allowed in this file; set the environment "
                "variables MANTIK_… (MANTIK_COMPUTE_BUDGET_ACCOUNT for the account) or use the "
                "keyring"
            )
        # Only what a slip explains: MarkerGrace is not TermGrace.
        known = [each for each in cls.key_names() if abs(len(each) - len(key)) <= 2]
        hints = " or ".join(cls.HINTS.get(key.lower(), ()))
        if meant := hints or find_alike(key, known, cutoff=0.75):
            return f"is an unknown key, did you mean {meant}?"
        return f"is an unknown key (allowed here: {', '.join(cls.key_names())})"


def local_path(value: object) -> str:
    """Return a path on this machine as written, if its key's own validation accepts it, else none.

    `value` is what the document has.
    """
    path = value.strip() if isinstance(value, str) else ""
    return "" if not path.isprintable() or path.startswith(("~", "$")) else path


def missing_file(value: object, project: Path, what: str = "the file") -> str:
    """Return the message that a path of this machine leads to no file; empty if it does."""
    path = local_path(value)
    if not path or os.path.isfile(project / path):
        return ""
    advice = f"the path is relative to the project folder {project}"
    return f"{what} {str(value)!r} was not found; {advice}"
