-- Money is in micro-units of the price catalogue's currency, rates in micro-units per million
-- tokens. A usage row keeps the price that it was booked at, and cannot disagree with it.
ALTER TABLE usage ADD COLUMN team_id TEXT;
ALTER TABLE usage ADD COLUMN user_id TEXT;
ALTER TABLE usage ADD COLUMN price TEXT NOT NULL DEFAULT '';
ALTER TABLE usage ADD COLUMN rate_input INTEGER NOT NULL DEFAULT 0 CHECK (rate_input >= 0);
ALTER TABLE usage ADD COLUMN rate_cached INTEGER NOT NULL DEFAULT 0 CHECK (rate_cached >= 0);
ALTER TABLE usage ADD COLUMN rate_output INTEGER NOT NULL DEFAULT 0 CHECK (rate_output >= 0);
ALTER TABLE usage ADD COLUMN cost INTEGER NOT NULL DEFAULT 0 CHECK (
    cost = (
        max(input - cached, 0) * rate_input + cached * rate_cached + output * rate_output + 999999
    ) / 1000000
);

CREATE INDEX usage_of_team ON usage (team_id, at) WHERE team_id IS NOT NULL;
CREATE INDEX usage_of_key ON usage (key_id, at) WHERE key_id IS NOT NULL;

-- What a key, a team or a user has spent in a month (yyyymm, UTC): the sum of its usage rows, kept
-- so that no budget check adds them up.
CREATE TABLE spend (
    kind    TEXT NOT NULL CHECK (kind IN ('key', 'team', 'user')),
    id      TEXT NOT NULL,
    month   INTEGER NOT NULL CHECK (month BETWEEN 197001 AND 999912 AND month % 100 BETWEEN 1 AND 12),
    amount  INTEGER NOT NULL CHECK (amount >= 0),
    PRIMARY KEY (kind, id, month)
) STRICT, WITHOUT ROWID;

-- `cost` is booked, `held` is what is still reserved of the estimate: nothing once a batch has ended.
ALTER TABLE batches ADD COLUMN max_cost INTEGER CHECK (max_cost >= 0);
ALTER TABLE batches ADD COLUMN cost INTEGER NOT NULL DEFAULT 0 CHECK (cost >= 0);
ALTER TABLE batches ADD COLUMN held INTEGER NOT NULL DEFAULT 0 CHECK (
    held >= 0
    AND (held = 0 OR status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring'))
);

-- What a line in flight may cost at most, as far as that can be told before it runs.
ALTER TABLE lines ADD COLUMN hold INTEGER NOT NULL DEFAULT 0 CHECK (
    hold >= 0 AND (hold = 0 OR state = 'running')
);

CREATE INDEX lines_held ON lines (batch_seq, hold) WHERE hold > 0;
CREATE INDEX batches_held ON batches (key_id)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'expiring');
