"""How the run of an entry point goes on past its walltime, from options and the backend config."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.model import ResourcesConfig
from snakemake_executor_plugin_mantik.jobs.segments import (
    CHECKPOINT_PATHS,
    CONTINUE,
    parse_continuation,
)
from snakemake_executor_plugin_mantik.mlproject.command_line import CommandMistakes

OPTIONS: Final = "--continue", "--checkpoint"


@dataclass(frozen=True)
class ContinueOptions:
    """The options of a command for that.

    Attributes:
        segments: how many segments the job may have; None: as the backend config says.
        checkpoint: what the next one goes on from, separated by blanks; empty: as the config says.
    """

    segments: int | None = None
    checkpoint: str = ""

    @property
    def words(self) -> list[str]:
        """The options as words of a command line."""
        given = [] if self.segments is None else [OPTIONS[0], str(self.segments)]
        return [*given, *([OPTIONS[1], self.checkpoint] if self.checkpoint else [])]

    def resolve(self, config: ResourcesConfig | None, wrong: CommandMistakes) -> "ContinueOptions":
        """Return what is in effect; without segments or a checkpoint, the run does not go on.

        Args:
            config: the site's; None if unknown.
            wrong: gets the mistakes.
        """
        segments, checkpoint = self.segments, self.checkpoint
        if config is not None:
            segments = config.segments if segments is None else segments
            checkpoint = checkpoint or config.checkpoint or ""
        if self.checkpoint and segments is None:
            wrong.notify(OPTIONS[1], "", f"needs {OPTIONS[0]} with a number of segments")
        elif self.segments and not checkpoint:
            wrong.notify(
                OPTIONS[0], "", f"needs {OPTIONS[1]} with what the next segment goes on from: the"
                " file or directory that the entry point saves its state in",
            )  # fmt: skip
        if not segments or not checkpoint:
            return ContinueOptions()
        try:
            found = parse_continuation({CONTINUE: segments, CHECKPOINT_PATHS: checkpoint}, [])
            if found is not None and config is not None:
                found.check_walltime(config.runtime_s)
        except UserError as error:
            wrong.notify(
                OPTIONS[1] if self.checkpoint else "Resources", "", f"{error.what}. {error.do}"
            )
        return ContinueOptions(segments, checkpoint)

    def resources(self, more: Sequence[str] = ()) -> dict[str, object]:
        """Return the rule's resources; `more` are further paths of the checkpoint."""
        if not self.segments:
            return {}
        return {CONTINUE: self.segments, CHECKPOINT_PATHS: " ".join([self.checkpoint, *more])}


UNCHANGED: Final = ContinueOptions()
"""No option is given."""
