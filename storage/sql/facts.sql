-- name: get
SELECT value, set_at FROM facts
WHERE kind = :kind AND key = :key AND (until_at IS NULL OR until_at > :now);

-- name: put
INSERT INTO facts (kind, key, value, set_at, until_at)
VALUES (:kind, :key, :value, :now, :until_at)
ON CONFLICT (kind, key) DO UPDATE SET
    value = excluded.value, set_at = excluded.set_at, until_at = excluded.until_at;

-- name: forget
-- A null key: everything of the kind.
DELETE FROM facts WHERE kind = :kind AND (:key IS NULL OR key = :key);

-- name: all
SELECT key, value, set_at FROM facts
WHERE kind = :kind AND (until_at IS NULL OR until_at > :now) ORDER BY key;

-- name: drop_past
DELETE FROM facts WHERE until_at <= :now;
