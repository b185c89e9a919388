-- name: accounts_of
-- What a usage row is attributed to besides its key.
SELECT team_id, user_id FROM keys WHERE id = :key_id;

-- name: book
-- [owner, key_id, team_id, user_id, model, execution, tier, input, cached, output, reasoning,
-- batch_seq, custom_id, at, price, rate_input, rate_cached, rate_output, cost] each.
INSERT INTO usage (
    owner, key_id, team_id, user_id, model, execution, tier, input, cached, output, reasoning,
    batch_seq, custom_id, at, price, rate_input, rate_cached, rate_output, cost
)
SELECT
    json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
    json_extract(value, '$[3]'), json_extract(value, '$[4]'), json_extract(value, '$[5]'),
    json_extract(value, '$[6]'), json_extract(value, '$[7]'), json_extract(value, '$[8]'),
    json_extract(value, '$[9]'), json_extract(value, '$[10]'), json_extract(value, '$[11]'),
    json_extract(value, '$[12]'), json_extract(value, '$[13]'), json_extract(value, '$[14]'),
    json_extract(value, '$[15]'), json_extract(value, '$[16]'), json_extract(value, '$[17]'),
    json_extract(value, '$[18]')
FROM json_each(:rows)
ORDER BY key;

-- name: booked
-- Which lines of a batch are booked already.
SELECT 1 FROM usage WHERE batch_seq = :batch_seq AND custom_id = :custom_id;

-- name: spend
INSERT INTO spend (kind, id, month, amount) VALUES (:kind, :id, :month, :amount)
ON CONFLICT (kind, id, month) DO UPDATE SET amount = amount + excluded.amount;

-- name: charge
-- What a batch has cost; what it reserved is used up by it.
UPDATE batches SET cost = cost + :cost, held = max(held - :cost, 0) WHERE seq = :batch_seq;

-- name: spent
SELECT amount FROM spend WHERE kind = :kind AND id = :id AND month = :month;

-- name: reserve
UPDATE batches SET max_cost = :max_cost, held = :hold WHERE seq = :batch_seq;

-- name: active
-- What the active batches and the interactive requests of a key, team or user hold; batches that hold
-- nothing are not worth a row. `own` is the batch that asks.
SELECT
    coalesce(sum(held), 0) AS reserved,
    coalesce(sum(max(in_flight - held, 0)), 0) + coalesce((
        SELECT sum(r.hold) FROM requests AS r JOIN keys AS k ON k.id = r.key_id
        WHERE CASE :kind WHEN 'key' THEN k.id WHEN 'team' THEN k.team_id ELSE k.user_id END = :id
    ), 0) AS in_flight
FROM (
    SELECT b.held, coalesce((SELECT sum(l.hold) FROM lines AS l
        WHERE l.batch_seq = b.seq AND l.hold > 0), 0) AS in_flight
    FROM batches AS b JOIN keys AS k ON k.id = b.key_id
    WHERE b.status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring')
    AND b.seq <> :own
    AND CASE :kind WHEN 'key' THEN k.id WHEN 'team' THEN k.team_id ELSE k.user_id END = :id
);

-- name: enqueued
-- Lines of active batches that have not ended, and the bytes of their files.
SELECT
    coalesce(sum(
        max(max(b.total, json_extract(f.facts, '$.lines')) - b.completed - b.failed, 0)
    ), 0) AS lines,
    coalesce(sum(f.bytes), 0) AS bytes
FROM batches AS b
JOIN files AS f ON f.seq = b.input_file_seq
JOIN keys AS k ON k.id = b.key_id
WHERE b.status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring')
AND CASE :kind WHEN 'key' THEN k.id WHEN 'team' THEN k.team_id ELSE k.user_id END = :id
AND b.seq <> :own;

-- name: batch
SELECT seq, key_id, max_cost, cost, held, status,
    coalesce((SELECT sum(hold) FROM lines WHERE batch_seq = :batch_seq AND hold > 0), 0) AS in_flight
FROM batches WHERE seq = :batch_seq;

-- name: hold
-- Zero rows: the lease is over.
UPDATE lines SET hold = :amount
WHERE batch_seq = :batch_seq AND no = :no AND token = :token AND state = 'running';

-- name: begin
INSERT INTO requests (key_id, hold) VALUES (:key_id, :hold);

-- name: release
DELETE FROM requests WHERE seq = :seq;

-- name: release_all
DELETE FROM requests;

-- name: stored
SELECT coalesce(sum(bytes), 0) FROM files
WHERE owner = :owner AND kind = 'input' AND deleted_at IS NULL;

-- name: report
-- One sum per group; what is not grouped by is null. A day is UTC. A row's `execution` is the place
-- that served it, and only a provider's Batch API books at the tier 'batch'.
SELECT
    CASE WHEN :day THEN date(u.at, 'unixepoch') END AS day,
    CASE WHEN :model THEN u.model END AS model,
    CASE WHEN :team THEN u.team_id END AS team,
    CASE WHEN :user THEN u.user_id END AS user,
    CASE WHEN :key THEN u.key_id END AS key,
    CASE WHEN :batch THEN b.id END AS batch,
    CASE WHEN :provider THEN nullif(u.execution, 'local') END AS provider,
    CASE WHEN :execution THEN CASE u.tier WHEN 'batch' THEN 'provider' ELSE 'local' END END
        AS execution,
    CASE WHEN :tier THEN u.tier END AS tier,
    count(*) AS rows,
    sum(u.input) AS input, sum(u.cached) AS cached, sum(u.output) AS output,
    sum(u.reasoning) AS reasoning, sum(u.cost) AS cost
FROM usage AS u LEFT JOIN batches AS b ON b.seq = u.batch_seq
WHERE u.at >= :since_at AND u.at < :until_at AND (:owner IS NULL OR u.owner = :owner)
GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9
ORDER BY 1, 2, 3, 4, 5, 6, 7, 8, 9;
