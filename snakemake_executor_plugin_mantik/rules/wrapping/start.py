"""How a payload is started as a program of its own, by what stands around it."""

from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.jobs.paths import file_path
from snakemake_executor_plugin_mantik.jobs.script import COMMAND_BYTES
from snakemake_executor_plugin_mantik.rules.context import Payload


def start_words(payload: Payload) -> tuple[list[str], tuple[Upload, ...]]:
    """The words that start the payload's shell, and a file for a command that is no word."""
    content = f"{payload.command}\n".encode("utf-8", "surrogateescape")
    if len(content) <= COMMAND_BYTES:
        return [payload.shell, "-c", payload.command], ()
    upload = Upload(file_path(content, "command"), content=content)
    return [payload.shell, upload.path], (upload,)
