-- name: new_blob
-- A draft's bytes go here first, invisible.
INSERT INTO blobs (created_at) VALUES (:now);

-- name: append_chunk
INSERT INTO chunks (blob, start, data) VALUES (?, ?, ?);

-- name: hold_blob
-- Zero rows: the draft was discarded or swept.
UPDATE blobs SET state = 'held' WHERE seq = :blob AND state = 'draft';

-- name: insert_input
INSERT INTO files (id, owner, filename, purpose, kind, bytes, created_at, expires_at, facts, blob)
VALUES (:id, :owner, :filename, :purpose, 'input', :bytes, :created_at, :expires_at, :facts, :blob);

-- name: insert_result
-- The file of one of a batch's two result streams.
INSERT INTO files
    (id, owner, filename, purpose, kind, bytes, created_at, expires_at, facts, batch_seq)
VALUES
    (:id, :owner, :filename, 'batch_output', :kind, :bytes, :created_at, :expires_at, :facts, :batch_seq);

-- name: get
-- A visible file; a null owner means: whoever owns it.
SELECT f.*, b.id AS batch_id
FROM files AS f LEFT JOIN batches AS b ON b.seq = f.batch_seq
WHERE f.id = :id AND f.deleted_at IS NULL AND (f.expires_at IS NULL OR f.expires_at > :now)
AND (:owner IS NULL OR f.owner = :owner);

-- name: cursor
-- The order of a file that a cursor names, deleted or not, so that a pager can go on.
SELECT seq FROM files WHERE id = :id AND owner = :owner;

-- name: page_desc
SELECT f.*, b.id AS batch_id
FROM files AS f LEFT JOIN batches AS b ON b.seq = f.batch_seq
WHERE f.owner = :owner AND f.deleted_at IS NULL AND f.seq < :after
AND (f.expires_at IS NULL OR f.expires_at > :now)
AND (:purpose IS NULL OR f.purpose = :purpose)
ORDER BY f.seq DESC LIMIT :limit;

-- name: page_asc
SELECT f.*, b.id AS batch_id
FROM files AS f LEFT JOIN batches AS b ON b.seq = f.batch_seq
WHERE f.owner = :owner AND f.deleted_at IS NULL AND f.seq > :after
AND (f.expires_at IS NULL OR f.expires_at > :now)
AND (:purpose IS NULL OR f.purpose = :purpose)
ORDER BY f.seq ASC LIMIT :limit;

-- name: reader
-- The id of an active batch that reads this file.
SELECT id FROM batches
WHERE input_file_seq = :seq
AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring')
ORDER BY seq LIMIT 1;

-- name: check
-- What a later check found.
UPDATE files SET facts = :facts WHERE seq = :seq;

-- name: delete
UPDATE files SET deleted_at = :now WHERE seq = :seq AND deleted_at IS NULL;

-- name: source
-- Where the bytes of a file are: a blob, or a stream of a batch's results.
SELECT blob, batch_seq, kind, bytes FROM files WHERE seq = :seq AND deleted_at IS NULL;

-- name: chunks
-- The pieces that hold bytes [start, stop): the first one may begin before start.
SELECT start, data FROM chunks
WHERE blob = :blob AND start < :stop
AND start >= (SELECT max(start) FROM chunks WHERE blob = :blob AND start <= :start)
ORDER BY start;

-- name: rows
-- The rows that hold bytes [start, stop) of one result stream: the first may begin before start.
SELECT start, row FROM results
WHERE batch_seq = :batch_seq AND kind = :kind AND start < :stop
AND start >= (
    SELECT max(start) FROM results
    WHERE batch_seq = :batch_seq AND kind = :kind AND start <= :start
)
ORDER BY start;

-- name: expire
-- Files past their time become deleted; an input that an active batch reads waits for its batch.
UPDATE files SET deleted_at = :now
WHERE seq IN (
    SELECT f.seq FROM files AS f
    WHERE f.deleted_at IS NULL AND f.expires_at <= :now
    AND NOT EXISTS (
        SELECT 1 FROM batches AS b WHERE b.input_file_seq = f.seq
        AND b.status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring')
    )
    LIMIT :n
);

-- name: next_expiry
-- When the next file expires that no active batch reads.
SELECT f.expires_at FROM files AS f
WHERE f.deleted_at IS NULL AND f.expires_at IS NOT NULL
AND NOT EXISTS (
    SELECT 1 FROM batches AS b WHERE b.input_file_seq = f.seq
    AND b.status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring')
)
ORDER BY f.expires_at LIMIT 1;

-- name: to_sweep
-- Deleted files that still have bytes.
SELECT f.seq, f.kind, f.blob, f.batch_seq, b.id AS batch_id
FROM files AS f LEFT JOIN batches AS b ON b.seq = f.batch_seq
WHERE f.deleted_at IS NOT NULL AND f.swept_at IS NULL
ORDER BY f.seq LIMIT :n;

-- name: drop_chunks
DELETE FROM chunks
WHERE seq IN (SELECT seq FROM chunks WHERE blob = :blob ORDER BY start LIMIT :n);

-- name: drop_rows
DELETE FROM results
WHERE seq IN (
    SELECT seq FROM results WHERE batch_seq = :batch_seq AND kind = :kind ORDER BY start LIMIT :n
);

-- name: swept
UPDATE files SET swept_at = :now, blob = NULL WHERE seq = :seq;

-- name: kill_blob
UPDATE blobs SET state = 'dead' WHERE seq = :blob AND state = 'draft';

-- name: bury_blob
-- The bytes of a file that was deleted.
UPDATE blobs SET state = 'dead' WHERE seq = :blob AND state = 'held';

-- name: kill_drafts
-- No draft outlives the process that wrote it.
UPDATE blobs SET state = 'dead' WHERE state = 'draft';

-- name: dead_blobs
SELECT seq FROM blobs WHERE state = 'dead' ORDER BY seq LIMIT :n;

-- name: drop_blob
DELETE FROM blobs WHERE seq = :blob;

-- name: to_prune
-- Ended batches whose result files are gone or never were: nobody needs their lines any more.
SELECT b.seq FROM batches AS b
WHERE b.pruned = 0 AND b.status IN ('completed', 'failed', 'cancelled', 'expired')
AND NOT EXISTS (SELECT 1 FROM files AS f WHERE f.batch_seq = b.seq AND f.swept_at IS NULL)
ORDER BY b.seq LIMIT :n;

-- name: drop_lines
DELETE FROM lines
WHERE batch_seq = :batch_seq
AND no IN (SELECT no FROM lines WHERE batch_seq = :batch_seq ORDER BY no LIMIT :n);

-- name: drop_all_rows
-- Rows of a batch that failed as a whole and has no result file of their kind.
DELETE FROM results
WHERE seq IN (SELECT seq FROM results WHERE batch_seq = :batch_seq ORDER BY seq LIMIT :n);

-- name: pruned
UPDATE batches SET pruned = 1 WHERE seq = :batch_seq;
