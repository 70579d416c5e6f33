"""The journal: which steps were taken, and which are about to be taken, written beforehand.

One SQLite file per workflow directory, `.snakemake/mantik/journal.sqlite`, used by one controller
at a time (a lock that dies with its process). Every write is a transaction of its own that survives
kill -9 when the method returns. Writes before a submission also survive power loss: the next
controller knows each attempt that may exist at a site. Later writes may be lost then; their facts
are queried from the site again. A spare file holds the facts that must survive a damaged journal.
Readers (`smk-mantik jobs`) may read at any time.
"""

from .backup import has_backup
from .database import JOURNAL_FILE, JournalCopy, connect
from .files import MADE, TIMESTAMP, FileLedger, WriteConflict
from .history import (
    RemoteOutputs,
    is_controlled,
    read_allocations,
    read_attempts,
    read_history,
    read_last_allocations,
    read_members,
    read_stored,
    read_undeclared,
    read_workflow,
    require_journal,
)
from .journal import BUCKET_SIZE, Journal
from .records import (
    GIVEN_UP,
    UNTIMED,
    WENT_ON,
    Asked,
    AttemptRecord,
    AttemptState,
    Event,
    EventKind,
    FileRecord,
    RemoteOutput,
    SiteRecord,
    SnakemakeRun,
    Times,
    UndeclaredFile,
    Used,
    content_name,
    decode_basis,
    encode_identity,
    is_checksum,
    is_utf8,
    job_name,
    read_events,
    sent_attempt_ids,
    turn_of,
)
from .schema import decode_identity
from .tracked import GOES_ON, TrackedAttempt, read_adopted, read_tracked
from .uses import read_uses
