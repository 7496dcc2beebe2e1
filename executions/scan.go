package executions

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// scan reads the row that rows is at into targets, as rows.Scan would. The row of an execution has forty columns, nearly all
// of them of a few types; pgx looks for the way to read each of them anew, which takes longer than to read it.
func scan(rows pgx.Rows, into []any) error {
	fields, raw := rows.FieldDescriptions(), rows.RawValues()
	if len(into) != len(raw) {
		return rows.Scan(into...) // says so
	}
	for i, target := range into {
		if simple(fields[i], raw[i], target) {
			continue
		}
		if err := rows.Conn().TypeMap().Scan(fields[i].DataTypeOID, fields[i].Format, raw[i], target); err != nil {
			return fmt.Errorf("read column %s: %w", fields[i].Name, err)
		}
	}
	return nil
}

// each reads the rows of a query into the same targets, and calls do after each. It closes them.
func each(rows pgx.Rows, into []any, do func() error) error {
	defer rows.Close()
	for rows.Next() {
		if err := scan(rows, into); err != nil {
			return err
		}
		if err := do(); err != nil {
			return err
		}
	}
	return rows.Err()
}

// simple reads a value of one of the types that are simple; false when it is not, or not simply, and nothing was read.
func simple(field pgconn.FieldDescription, raw []byte, target any) bool {
	switch {
	case target == nil:
		return true
	case raw == nil:
		return simpleNull(target)
	case field.DataTypeOID == pgtype.TextOID:
		return simpleText(raw, target)
	case field.DataTypeOID == pgtype.JSONBOID && field.Format == pgtype.TextFormatCode:
		to, ok := target.(*json.RawMessage)
		if ok {
			*to = slices.Clone(raw)
		}
		return ok
	}
	return field.Format == pgtype.BinaryFormatCode && simpleBinary(field.DataTypeOID, raw, target)
}

// simpleNull is simple for null.
func simpleNull(target any) bool {
	switch to := target.(type) {
	case **string:
		*to = nil
	case **int:
		*to = nil
	case **time.Time:
		*to = nil
	case *json.RawMessage:
		*to = nil
	default:
		return false
	}
	return true
}

// simpleText is simple for text.
func simpleText(raw []byte, target any) bool {
	switch to := target.(type) {
	case *string:
		*to = string(raw)
	case **string:
		*to = new(string(raw))
	case *Status:
		*to = Status(raw)
	default:
		return false
	}
	return true
}

// simpleBinary is simple for types that are written otherwise in text.
func simpleBinary(oid uint32, raw []byte, target any) bool {
	switch to := target.(type) {
	case *int:
		n, ok := integer(oid, raw)
		if ok {
			*to = int(n)
		}
		return ok
	case *int64:
		n, ok := integer(oid, raw)
		if ok {
			*to = n
		}
		return ok
	case *bool:
		if oid != pgtype.BoolOID || len(raw) != 1 {
			return false
		}
		*to = raw[0] != 0
		return true
	case *time.Time:
		return timestamp(oid, raw, to)
	case *json.RawMessage:
		if oid != pgtype.JSONBOID || len(raw) == 0 || raw[0] != 1 { // the version of what follows
			return false
		}
		*to = slices.Clone(raw[1:])
		return true
	}
	return false
}

// timestamp reads a time in binary, which counts the microseconds of this millennium; not one that only PostgreSQL can tell.
func timestamp(oid uint32, raw []byte, to *time.Time) bool {
	if oid != pgtype.TimestamptzOID || len(raw) != 8 {
		return false
	}
	n := int64(binary.BigEndian.Uint64(raw))
	if n < 0 || n > plainTime {
		return false
	}
	*to = time.Unix(millennium+n/1e6, n%1e6*1e3).UTC()
	return true
}

const (
	millennium = 946684800               // seconds, from 1970 to 2000
	plainTime  = 1e6 * 86400 * 365 * 100 // microseconds: a hundred years, which have nothing special
)

// integer reads a number in binary.
func integer(oid uint32, raw []byte) (int64, bool) {
	switch {
	case oid == pgtype.Int2OID && len(raw) == 2:
		return int64(int16(binary.BigEndian.Uint16(raw))), true
	case oid == pgtype.Int4OID && len(raw) == 4:
		return int64(int32(binary.BigEndian.Uint32(raw))), true
	case oid == pgtype.Int8OID && len(raw) == 8:
		return int64(binary.BigEndian.Uint64(raw)), true
	}
	return 0, false
}
