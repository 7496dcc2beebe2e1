package postgres

import (
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// PostgreSQL has times that Go and JSON lack: infinity, and years before 1 and after 9999. For such a time, a query
// returns the nearest time that every client can represent. So one such time does not block the reading of other rows.
// The earliest of these times is not Go's zero time, which means no time.
var (
	firstTime = time.Date(1, time.January, 2, 0, 0, 0, 0, time.UTC)
	lastTime  = time.Date(9999, time.December, 30, 0, 0, 0, 0, time.UTC)
)

// readTimes makes conn read times as finite UTC values in any zone of the machine. So times look the same in JSON and
// logs of every machine.
func readTimes(conn *pgx.Conn) {
	conn.TypeMap().RegisterType(&pgtype.Type{
		Name: "timestamptz", OID: pgtype.TimestamptzOID, Codec: &timeCodec{pgtype.TimestamptzCodec{ScanLocation: time.UTC}},
	})
}

// timeCodec reads values that pgx's codec refuses into a time.Time. It reads other targets like pgx.
type timeCodec struct{ pgtype.TimestamptzCodec }

// PlanScan implements pgtype.Codec.
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

// Scan implements pgtype.ScanPlan.
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
