-- name: file
SELECT * FROM upstream_files WHERE file_seq = :file_seq AND provider = :provider;

-- name: keep_file
INSERT INTO upstream_files (file_seq, provider, id, created_at, expires_at)
VALUES (:file_seq, :provider, :id, :created_at, :expires_at)
ON CONFLICT (file_seq, provider) DO UPDATE SET
    id = excluded.id, created_at = excluded.created_at, expires_at = excluded.expires_at;

-- name: batch
SELECT u.*, b.id AS batch_id FROM upstream_batches AS u JOIN batches AS b ON b.seq = u.batch_seq
WHERE u.batch_seq = :batch_seq;

-- name: unsettled
SELECT u.*, b.id AS batch_id FROM upstream_batches AS u JOIN batches AS b ON b.seq = u.batch_seq
WHERE u.settled_at IS NULL
ORDER BY u.batch_seq;

-- name: keep_batch
-- A settled one stays as it is: a look that began before must not bring it back.
INSERT INTO upstream_batches (
    batch_seq, provider, id, status, completed, failed, output_id, error_id, problems,
    intended_at, looked_at, tries, settled_at, input_id, ended_at
) VALUES (
    :batch_seq, :provider, :id, :status, :completed, :failed, :output_id, :error_id, :problems,
    :intended_at, :looked_at, :tries, :settled_at, :input_id, :ended_at
)
ON CONFLICT (batch_seq) DO UPDATE SET
    id = excluded.id, status = excluded.status, completed = excluded.completed,
    failed = excluded.failed, output_id = excluded.output_id, error_id = excluded.error_id,
    problems = excluded.problems, looked_at = excluded.looked_at, tries = excluded.tries,
    settled_at = excluded.settled_at, input_id = excluded.input_id, ended_at = excluded.ended_at
WHERE upstream_batches.settled_at IS NULL;

-- name: withdraw_intent
DELETE FROM upstream_batches WHERE batch_seq = :batch_seq AND settled_at IS NULL;

-- name: withdraw
-- Only a batch that nothing has happened to.
DELETE FROM batches
WHERE seq = :batch_seq AND status = 'validating'
AND queued = 0 AND running = 0 AND completed = 0 AND failed = 0
RETURNING id, owner;

-- name: latch
UPDATE upstream_batches SET latched_until = :until_at
WHERE batch_seq = :batch_seq AND settled_at IS NULL
AND (:until_at = 0 OR latched_until <= :now);

-- name: unlatch_all
UPDATE upstream_batches SET latched_until = 0 WHERE latched_until > 0;

-- name: left_by_batches
-- What settled batches left at a provider. The copy of their input stays while another batch reads
-- it; that one's end finds it then.
SELECT u.batch_seq, u.input_id, u.output_id, u.error_id, c.id AS copy_id, c.file_seq
FROM upstream_batches AS u
JOIN batches AS b ON b.seq = u.batch_seq
LEFT JOIN upstream_files AS c ON c.file_seq = b.input_file_seq AND c.provider = u.provider
    AND NOT EXISTS (
        SELECT 1 FROM batches AS other WHERE other.input_file_seq = b.input_file_seq
        AND other.status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring')
    )
WHERE u.provider = :provider AND u.settled_at IS NOT NULL AND u.cleared_at IS NULL
ORDER BY u.batch_seq LIMIT :n;

-- name: left_by_files
-- Copies of files that were deleted, or expired, here.
SELECT c.file_seq, c.id FROM upstream_files AS c JOIN files AS f ON f.seq = c.file_seq
WHERE c.provider = :provider AND f.deleted_at IS NOT NULL
AND NOT EXISTS (
    SELECT 1 FROM batches AS other WHERE other.input_file_seq = c.file_seq
    AND other.status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring')
)
ORDER BY c.file_seq LIMIT :n;

-- name: clear_batch
UPDATE upstream_batches SET cleared_at = :now WHERE batch_seq = :batch_seq;

-- name: clear_file
-- Only the copy that was deleted: there may be a newer one.
DELETE FROM upstream_files
WHERE file_seq = :file_seq AND provider = :provider
AND id IN (SELECT value FROM json_each(:ids));

-- name: queued
-- Which of these custom ids still wait: [position, no, model] each, as one JSON array.
SELECT json_group_array(json_array(j.key, l.no, l.model))
FROM json_each(:custom_ids) AS j
CROSS JOIN lines AS l ON l.batch_seq = :batch_seq AND l.custom_id = j.value
WHERE l.state = 'queued';
