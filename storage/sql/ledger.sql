-- name: book
-- A line is booked once, however often its result is reported.
INSERT INTO usage (
    owner, key_id, model, execution, tier, input, cached, output, reasoning, batch_seq, custom_id, at
) VALUES (
    :owner, :key_id, :model, :execution, :tier, :input, :cached, :output, :reasoning,
    (SELECT seq FROM batches WHERE id = :batch_id), :custom_id, :at
)
ON CONFLICT (batch_seq, custom_id) WHERE batch_seq IS NOT NULL DO NOTHING;

-- name: of_owner
SELECT u.*, b.id AS batch_id FROM usage AS u LEFT JOIN batches AS b ON b.seq = u.batch_seq
WHERE u.owner = :owner AND u.at >= :since_at AND u.at < :until_at ORDER BY u.seq;

-- name: of_all
SELECT u.*, b.id AS batch_id FROM usage AS u LEFT JOIN batches AS b ON b.seq = u.batch_seq
WHERE u.at >= :since_at AND u.at < :until_at ORDER BY u.seq;
