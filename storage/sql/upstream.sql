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
    intended_at, looked_at, tries, settled_at
) VALUES (
    :batch_seq, :provider, :id, :status, :completed, :failed, :output_id, :error_id, :problems,
    :intended_at, :looked_at, :tries, :settled_at
)
ON CONFLICT (batch_seq) DO UPDATE SET
    id = excluded.id, status = excluded.status, completed = excluded.completed,
    failed = excluded.failed, output_id = excluded.output_id, error_id = excluded.error_id,
    problems = excluded.problems, looked_at = excluded.looked_at, tries = excluded.tries,
    settled_at = excluded.settled_at
WHERE upstream_batches.settled_at IS NULL;

-- name: withdraw_intent
DELETE FROM upstream_batches WHERE batch_seq = :batch_seq AND settled_at IS NULL;

-- name: withdraw
-- Only a batch that nothing has happened to.
DELETE FROM batches
WHERE seq = :batch_seq AND status = 'validating'
AND queued = 0 AND running = 0 AND completed = 0 AND failed = 0;

-- name: latch
UPDATE upstream_batches SET latched_until = :until_at
WHERE batch_seq = :batch_seq AND settled_at IS NULL
AND (:until_at = 0 OR latched_until <= :now);

-- name: unlatch_all
UPDATE upstream_batches SET latched_until = 0 WHERE latched_until > 0;

-- name: queued
-- Which of these custom ids still wait: [position, no, model] each, as one JSON array.
SELECT json_group_array(json_array(j.key, l.no, l.model))
FROM json_each(:custom_ids) AS j
CROSS JOIN lines AS l ON l.batch_seq = :batch_seq AND l.custom_id = j.value
WHERE l.state = 'queued';
