-- name: seq_of
SELECT seq FROM batches WHERE id = :id;

-- name: of_owner
SELECT u.*, b.id AS batch_id FROM usage AS u LEFT JOIN batches AS b ON b.seq = u.batch_seq
WHERE u.owner = :owner AND u.at >= :since_at AND u.at < :until_at ORDER BY u.seq;

-- name: of_all
SELECT u.*, b.id AS batch_id FROM usage AS u LEFT JOIN batches AS b ON b.seq = u.batch_seq
WHERE u.at >= :since_at AND u.at < :until_at ORDER BY u.seq;
