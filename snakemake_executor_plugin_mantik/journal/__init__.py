"""The journal: what was done and what is about to be done, written before it is done.

One SQLite file per workflow directory, `.snakemake/mantik/journal.sqlite`, used by one controller
at a time (a lock that dies with its process). Every write is a transaction of its own that survives
kill -9 when the method returns. What comes before a submission survives power loss, too: the next
controller knows each try that may exist at a site. What comes after it may be forgotten by that: it
is then asked of the site again. A spare file holds what a damaged journal must not take with it.
Readers (`smk-mantik jobs`) may look at any time.
"""

from snakemake_executor_plugin_mantik.journal.database import JOURNAL_FILE, JournalCopy
from snakemake_executor_plugin_mantik.journal.files import MADE, FileLedger, WriteConflict
from snakemake_executor_plugin_mantik.journal.journal import (
    BUCKET_SIZE,
    Journal,
    journal_path,
    read_history,
)
from snakemake_executor_plugin_mantik.journal.records import (
    FileRecord,
    SiteRecord,
    TryRecord,
    TryState,
    job_name,
    sent_try_ids,
)

__all__ = [
    "BUCKET_SIZE",
    "JOURNAL_FILE",
    "MADE",
    "FileLedger",
    "FileRecord",
    "Journal",
    "JournalCopy",
    "SiteRecord",
    "TryRecord",
    "TryState",
    "WriteConflict",
    "job_name",
    "journal_path",
    "read_history",
    "sent_try_ids",
]
