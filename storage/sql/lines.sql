-- name: batch
-- What a change of a batch's lines needs to know about the batch.
SELECT b.*, f.blob FROM batches AS b JOIN files AS f ON f.seq = b.input_file_seq
WHERE b.seq = :batch_seq;

-- name: add
-- One statement for many lines: [no, offset, length, custom_id, model] each. A line that is there
-- already stays as it is.
INSERT INTO lines (batch_seq, no, offset, length, custom_id, model)
SELECT
    :batch_seq, json_extract(value, '$[0]'), json_extract(value, '$[1]'),
    json_extract(value, '$[2]'), json_extract(value, '$[3]'), json_extract(value, '$[4]')
FROM json_each(:lines)
WHERE true
ON CONFLICT (batch_seq, no) DO NOTHING;

-- name: pick
-- The next queued lines that are due, as one JSON array, with the attempt they get.
SELECT json_group_array(json_array(no, offset, length, custom_id, attempt + 1))
FROM (
    SELECT no, offset, length, custom_id, attempt FROM lines
    WHERE batch_seq = :batch_seq AND state = 'queued' AND due_at <= :now
    ORDER BY no LIMIT :n
);

-- name: pick_models
-- The same among the lines of some models.
SELECT json_group_array(json_array(no, offset, length, custom_id, attempt + 1))
FROM (
    SELECT no, offset, length, custom_id, attempt FROM lines
    WHERE batch_seq = :batch_seq AND state = 'queued' AND due_at <= :now
    AND model IN (SELECT value FROM json_each(:models))
    ORDER BY no LIMIT :n
);

-- name: models
SELECT DISTINCT model FROM lines WHERE batch_seq = :batch_seq;

-- name: take_tokens
UPDATE fence SET token = token + :n;

-- name: last_token
SELECT token FROM fence;

-- name: lease
-- The tokens of one lease are a base plus the line's number: each is new, and needs no second pass.
UPDATE lines SET
    state = 'running', token = :base + no, attempt = attempt + 1, due_at = 0,
    holder = :holder, lease_until = :until_at
WHERE batch_seq = :batch_seq AND state = 'queued' AND no IN (SELECT value FROM json_each(:nos));

-- name: fenced
-- Which of [batch_seq, no, token] still hold their line: [position, custom_id, model] each, as one
-- JSON array.
SELECT json_group_array(json_array(j.key, l.custom_id, l.model))
FROM json_each(:settlements) AS j
CROSS JOIN lines AS l
    ON l.batch_seq = json_extract(j.value, '$[0]') AND l.no = json_extract(j.value, '$[1]')
WHERE l.state = 'running' AND l.token = json_extract(j.value, '$[2]');

-- name: end
-- Lines of one batch reach their last state.
UPDATE lines SET state = :to, holder = NULL, lease_until = NULL, due_at = 0, hold = 0
WHERE batch_seq = :batch_seq AND state = :frm AND no IN (SELECT value FROM json_each(:nos));

-- name: insert_rows
-- [no, kind, start, place, length] each; the bytes are cut out of one blob at place.
INSERT INTO results (batch_seq, no, kind, start, row)
SELECT
    :batch_seq, json_extract(value, '$[0]'), json_extract(value, '$[1]'),
    json_extract(value, '$[2]'),
    substr(:bytes, json_extract(value, '$[3]') + 1, json_extract(value, '$[4]'))
FROM json_each(:rows)
ORDER BY key;

-- name: count
-- Move a batch's counters by what one commit did to its lines.
UPDATE batches SET
    queued = queued + :queued,
    running = running + :running,
    completed = completed + :completed,
    failed = failed + :failed,
    lines_rerun = lines_rerun + :rerun,
    output_bytes = output_bytes + :output_bytes,
    error_bytes = error_bytes + :error_bytes,
    input_tokens = input_tokens + :input,
    cached_tokens = cached_tokens + :cached,
    output_tokens = output_tokens + :output,
    reasoning_tokens = reasoning_tokens + :reasoning
WHERE seq = :batch_seq;

-- name: left
SELECT queued, running FROM batches WHERE seq = :batch_seq;

-- name: drained
-- The last-line rule: nothing is queued or running, so the batch moves on.
UPDATE batches SET status = :to, finalizing_at = coalesce(finalizing_at, :now)
WHERE seq = :batch_seq AND status = :frm AND queued = 0 AND running = 0;

-- name: release
-- Back to queued, with the attempt given back or spent.
UPDATE lines SET
    state = 'queued', holder = NULL, lease_until = NULL, due_at = :due_at, hold = 0,
    attempt = attempt - :give_back
WHERE batch_seq = :batch_seq AND state = 'running' AND no IN (SELECT value FROM json_each(:nos));

-- name: extend
UPDATE lines SET lease_until = :until_at
WHERE state = 'running' AND holder = :holder AND lease_until < :until_at;

-- name: lapsed
-- How many lines per batch run on a lease that is over (a null now: all that run).
SELECT batch_seq, count(*) AS n FROM lines INDEXED BY lines_running
WHERE state = 'running' AND (:now IS NULL OR lease_until < :now)
GROUP BY batch_seq;

-- name: reclaim
UPDATE lines INDEXED BY lines_running
SET state = 'queued', holder = NULL, lease_until = NULL, due_at = 0, hold = 0
WHERE state = 'running' AND (:now IS NULL OR lease_until < :now);

-- name: waiting
-- The next queued lines of a batch, due or not: [no, custom_id] each, as one JSON array.
SELECT json_group_array(json_array(no, custom_id))
FROM (
    SELECT no, custom_id FROM lines
    WHERE batch_seq = :batch_seq AND state = 'queued' ORDER BY no LIMIT :n
);

-- name: running
SELECT running FROM batches WHERE seq = :batch_seq;

-- name: queued
-- The size of the intake pool.
SELECT coalesce(sum(queued), 0) FROM batches
WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring');

-- name: next_due_at
-- Lines of ended batches stay queued until they are pruned; they are not due for anything.
SELECT l.due_at FROM lines AS l JOIN batches AS b ON b.seq = l.batch_seq
WHERE l.state = 'queued' AND l.due_at > 0
AND b.status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring')
ORDER BY l.due_at LIMIT 1;

-- name: rows
-- Rows of a result file that was deleted are gone before the sweep has removed them.
SELECT seq, kind, row FROM results AS r
WHERE batch_seq = :batch_seq AND seq > :after
AND NOT EXISTS (
    SELECT 1 FROM files AS f
    WHERE f.batch_seq = r.batch_seq AND f.kind = r.kind AND f.deleted_at IS NOT NULL
)
ORDER BY seq LIMIT :limit;

-- name: streams
-- The result streams that have an incremental file or should have one.
SELECT b.seq, b.id, k.kind,
    CASE k.kind WHEN 'output' THEN b.output_bytes ELSE b.error_bytes END AS bytes
FROM batches AS b CROSS JOIN (SELECT 'output' AS kind UNION ALL SELECT 'error') AS k
WHERE b.pruned = 0
AND NOT EXISTS (
    SELECT 1 FROM files AS f
    WHERE f.batch_seq = b.seq AND f.kind = k.kind AND f.deleted_at IS NOT NULL
)
ORDER BY b.seq;

-- name: seq_of
SELECT seq FROM batches WHERE id = :id;
