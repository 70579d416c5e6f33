"""Journals of older versions: what makes one of the newest."""

UNDO_9 = """
DROP TABLE awaited; DROP INDEX tries_waited;
DROP TABLE undeclared;
DROP TABLE imports;
ALTER TABLE tries DROP COLUMN started; ALTER TABLE tries DROP COLUMN runtime;
ALTER TABLE tries DROP COLUMN pending; ALTER TABLE tries DROP COLUMN logs;
DROP TABLE kept; ALTER TABLE tries DROP COLUMN segment; ALTER TABLE tries DROP COLUMN segments;
ALTER TABLE tries DROP COLUMN follows; ALTER TABLE tries DROP COLUMN goes_on;
ALTER TABLE tries DROP COLUMN expected;
ALTER TABLE tries DROP COLUMN asked; ALTER TABLE tries DROP COLUMN used; DROP TABLE runs;
DROP TABLE uploads;
DROP TABLE stored; ALTER TABLE remote_files DROP COLUMN modified;
ALTER TABLE remote_files DROP COLUMN mode;
DROP TABLE made; DROP INDEX tries_after; ALTER TABLE tries DROP COLUMN after;
PRAGMA user_version = 8;
"""
UNDO_7 = (
    "DROP TABLE secrets; ALTER TABLE tries DROP COLUMN sent; ALTER TABLE tries DROP COLUMN waits;"
    "PRAGMA user_version = 6;"
)
UNDO_8 = """
DROP TABLE places; DROP TABLE buckets; DROP TABLE numbered; DROP INDEX tries_place;
ALTER TABLE sites DROP COLUMN place; ALTER TABLE tries DROP COLUMN place;
ALTER TABLE remote_files RENAME COLUMN place TO site;
ALTER TABLE bundles RENAME COLUMN place TO site;
ALTER TABLE workflow DROP COLUMN instance; ALTER TABLE workflow DROP COLUMN seat;
DROP TABLE local_files;
CREATE TABLE local_files (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, sha256 TEXT);
UPDATE remote_files SET site = 'hpc1'; UPDATE bundles SET site = 'hpc1';
PRAGMA user_version = 7;
"""
UNDO_6 = "DROP INDEX bundle_files_content; PRAGMA user_version = 5;"
UNDO_5 = (
    "ALTER TABLE sites DROP COLUMN config; ALTER TABLE tries DROP COLUMN made_of;"
    "PRAGMA user_version = 4;"
)
UNDO_4 = "DROP TABLE members; PRAGMA user_version = 3;"
UNDO_3 = "DROP INDEX tries_name; ALTER TABLE tries DROP COLUMN reason; PRAGMA user_version = 2;"
UNDO_2 = "DROP TABLE workflow; DROP TABLE links; PRAGMA user_version = 1;"
UNDO = (UNDO_9 + UNDO_8, UNDO_7, UNDO_6, UNDO_5, UNDO_4, UNDO_3, UNDO_2)
"""The steps from each version to the one before, newest first, as SQL. The first undoes two."""
