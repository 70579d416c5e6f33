"""What a job is, the same in every run."""

import hashlib
import json
import os
from typing import Any

from snakemake_executor_plugin_mantik.rules import Job


def job_identity(job: Job) -> str:
    """A name for what the job is: its rule, wildcards and outputs."""
    wildcards = sorted((key, str(value)) for key, value in job.wildcards_dict.items())
    parts = [job.rule.name, wildcards, [plain_path(path) for path in job.output]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def plain_path(path: Any) -> str:
    """A path as archives and listings have it: without `./` and `//`."""
    return os.path.normpath(str(path))
