-- name: add
INSERT INTO accounts (kind, id, name, limits, created_at, closed_at)
VALUES (:kind, :id, :name, :limits, :created_at, :closed_at);

-- name: taken
SELECT 1 FROM accounts
WHERE kind = :kind AND name = :name AND closed_at IS NULL AND id <> :except;

-- name: get
-- By id, or by the name of an open one.
SELECT * FROM accounts
WHERE kind = :kind AND (id = :asked OR (name = :asked AND closed_at IS NULL))
ORDER BY id = :asked DESC LIMIT 1;

-- name: by_id
SELECT * FROM accounts WHERE id = :id;

-- name: page
SELECT * FROM accounts WHERE kind = :kind ORDER BY seq;

-- name: change
UPDATE accounts SET name = coalesce(:name, name), limits = coalesce(:limits, limits)
WHERE id = :id;

-- name: close
UPDATE accounts SET closed_at = :now WHERE id = :id AND closed_at IS NULL;

-- name: key
SELECT * FROM keys WHERE id = :id;
