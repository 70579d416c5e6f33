"""The cells of the matrix that make no sense, and why."""

NOT_TRIED = {
    "firecREST's transfers at UNICORE": "there are none: large files come like small ones",
    "disk full here x cancel": "cancelling writes a few bytes to the journal alone; what happens"
    " then is that of watch",
    "disk full at the site x cancel": "to end a job takes no space but for the directory that"
    " revokes it, which is tried at stage",
}
