-- name: add
INSERT INTO keys (id, name, owner, prefix, digest, scopes, created_at, expires_at, revoked_at)
VALUES (:id, :name, :owner, :prefix, :digest, :scopes, :created_at, :expires_at, :revoked_at);

-- name: find
SELECT * FROM keys WHERE digest = :digest;

-- name: page
SELECT * FROM keys ORDER BY seq;

-- name: revoke
UPDATE keys SET revoked_at = :now WHERE id = :id AND revoked_at IS NULL;
