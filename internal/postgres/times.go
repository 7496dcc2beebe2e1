package postgres

import (
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// PostgreSQL knows more times than Go and JSON do: infinity, and years before 1 and after 9999. A row that has such a
// time is read as having the nearest that everybody can tell, so that it does not keep the rows around it from being
// read. The first is not the zero time, which means that there is none.
var (
	firstTime = time.Date(1, time.January, 2, 0, 0, 0, 0, time.UTC)
	lastTime  = time.Date(9999, time.December, 30, 0, 0, 0, 0, time.UTC)
)

// readTimes makes the times that conn reads UTC whatever the machine's zone, so that they show alike in JSON and in
// logs everywhere, and finite.
func readTimes(conn *pgx.Conn) {
	conn.TypeMap().RegisterType(&pgtype.Type{
		Name: "timestamptz", OID: pgtype.TimestamptzOID, Codec: &timeCodec{pgtype.TimestamptzCodec{ScanLocation: time.UTC}},
	})
}

// timeCodec reads into a time.Time what the codec of pgx refuses. Other targets are read as pgx does.
type timeCodec struct{ pgtype.TimestamptzCodec }

// PlanScan is part of pgtype.Codec.
func (c *timeCodec) PlanScan(m *pgtype.Map, oid uint32, format int16, target any) pgtype.ScanPlan {
	if _, plain := target.(*time.Time); !plain {
		return c.TimestamptzCodec.PlanScan(m, oid, format, target)
	}
	if plan := c.TimestamptzCodec.PlanScan(m, oid, format, &pgtype.Timestamptz{}); plan != nil {
		return timePlan{plan}
	}
	return nil
}

type timePlan struct{ whole pgtype.ScanPlan }

// Scan is part of pgtype.ScanPlan.
func (p timePlan) Scan(from []byte, target any) error {
	var read pgtype.Timestamptz
	if err := p.whole.Scan(from, &read); err != nil {
		return err
	}
	into, plain := target.(*time.Time)
	switch {
	case !plain:
		return fmt.Errorf("cannot scan a time into %T", target)
	case !read.Valid:
		return fmt.Errorf("cannot scan NULL into %T", target)
	}
	*into = clampTime(read)
	return nil
}

// clampTime returns a time within the range that JSON and every client can represent.
func clampTime(t pgtype.Timestamptz) time.Time {
	switch {
	case t.InfinityModifier == pgtype.Infinity, t.InfinityModifier == pgtype.Finite && t.Time.After(lastTime):
		return lastTime
	case t.InfinityModifier == pgtype.NegativeInfinity, t.Time.Before(firstTime):
		return firstTime
	}
	return t.Time
}
