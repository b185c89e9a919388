-- name: add
INSERT INTO keys (
    id, name, owner, prefix, digest, scopes, created_at, expires_at, revoked_at, team_id, user_id,
    limits, last_used_at
) VALUES (
    :id, :name, :owner, :prefix, :digest, :scopes, :created_at, :expires_at, :revoked_at, :team_id,
    :user_id, :limits, :last_used_at
);

-- name: find
SELECT * FROM keys WHERE digest = :digest;

-- name: page
SELECT * FROM keys ORDER BY seq;

-- name: revoke
UPDATE keys SET revoked_at = :now WHERE id = :id AND revoked_at IS NULL;

-- name: by_id
SELECT * FROM keys WHERE id = :id;

-- name: change
UPDATE keys SET
    name = coalesce(:name, name),
    limits = coalesce(:limits, limits),
    expires_at = CASE WHEN :ends THEN :expires_at ELSE expires_at END
WHERE id = :id;

-- name: touch
-- [id, at] each.
UPDATE keys SET last_used_at = max(coalesce(last_used_at, 0), seen.at)
FROM (
    SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS at
    FROM json_each(:seen)
) AS seen
WHERE keys.id = seen.id;
