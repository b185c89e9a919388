-- name: note
INSERT INTO audit (at, actor, action, object, owner, request_id)
VALUES (:at, :actor, :action, :object, :owner, :request_id);

-- name: page
SELECT * FROM audit
WHERE seq > :after AND (:object IS NULL OR object = :object) ORDER BY seq LIMIT :limit;
