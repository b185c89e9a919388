-- Interactive requests in flight, and what each may cost: what is here when a server starts is a dead
-- one's.
CREATE TABLE requests (
    seq     INTEGER PRIMARY KEY AUTOINCREMENT,
    key_id  TEXT NOT NULL,
    hold    INTEGER NOT NULL CHECK (hold > 0)
) STRICT;
