-- name: by_idempotency_key
SELECT * FROM batches WHERE owner = :owner AND idempotency_key = :key;

-- name: readable_input
-- One row when the file may back a new batch.
SELECT 1 FROM files
WHERE seq = :seq AND kind = 'input' AND deleted_at IS NULL
AND (expires_at IS NULL OR expires_at > :now);

-- name: active_of_file
SELECT * FROM batches
WHERE input_file_seq = :seq
AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring')
ORDER BY seq LIMIT 1;

-- name: just_completed
SELECT * FROM (SELECT * FROM batches WHERE owner = :owner ORDER BY seq DESC LIMIT :n)
WHERE input_file_seq = :seq AND created_at >= :since AND status = 'completed'
ORDER BY seq DESC LIMIT 1;

-- name: insert
INSERT INTO batches (
    id, owner, key_id, input_file_id, input_file_seq, endpoint, completion_window, created_at,
    expires_at, metadata, params, placement, output_expires_after_s, idempotency_key, exclusive
) VALUES (
    :id, :owner, :key_id, :input_file_id, :input_file_seq, :endpoint, :completion_window,
    :created_at, :expires_at, :metadata, :params, :placement, :output_expires_after_s,
    :idempotency_key, :exclusive
);

-- name: by_seq
SELECT * FROM batches WHERE seq = :seq;

-- name: by_id
SELECT * FROM batches WHERE id = :id AND (:owner IS NULL OR owner = :owner);

-- name: cursor
SELECT seq FROM batches WHERE id = :id AND owner = :owner;

-- name: page_desc
SELECT * FROM batches WHERE owner = :owner AND seq < :after ORDER BY seq DESC LIMIT :limit;

-- name: page_asc
SELECT * FROM batches WHERE owner = :owner AND seq > :after ORDER BY seq ASC LIMIT :limit;

-- name: active
SELECT * FROM batches
WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring')
ORDER BY seq;

-- name: move
-- The state and its stamp; a stamp that is set stays.
UPDATE batches SET
    status = :to,
    problems = coalesce(:problems, problems),
    in_progress_at = coalesce(in_progress_at, :in_progress_at),
    finalizing_at = coalesce(finalizing_at, :finalizing_at),
    completed_at = coalesce(completed_at, :completed_at),
    failed_at = coalesce(failed_at, :failed_at),
    expired_at = coalesce(expired_at, :expired_at),
    cancelling_at = coalesce(cancelling_at, :cancelling_at),
    cancelled_at = coalesce(cancelled_at, :cancelled_at),
    total = :total,
    output_file_id = :output_file_id,
    error_file_id = :error_file_id,
    held = CASE WHEN :to IN ('completed', 'failed', 'cancelled', 'expired') THEN 0 ELSE held END
WHERE seq = :seq AND status = :frm;

-- name: model
UPDATE batches SET model = :model, total = :total WHERE seq = :seq
AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring');

-- name: place
UPDATE batches SET placement = :placement WHERE seq = :seq
AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring');
