package skills

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// sqlFailure gives an error of a query its class.
func sqlFailure(limit fmt.Stringer, err error) error {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	switch {
	case errors.As(err, new(*CallError)):
		return err
	case !ok:
		return failure(ClassNetwork, "query the database: %s", err)
	case postgres.IsCode(err, "57014"):
		return failure(ClassTimeout, "the query did not end within %s", limit)
	}
	message := fmt.Sprintf("%s (SQLSTATE %s)", pgErr.Message, pgErr.Code)
	if pgErr.Hint != "" {
		message += ": " + pgErr.Hint
	}
	return failure(ClassSQL, "%s", message)
}

// parameterTexts writes the values of parameters of the given types.
func parameterTexts(values []any, oids []uint32) ([][]byte, error) {
	texts := make([][]byte, len(values))
	for i, value := range values {
		text, err := parameterText(value, oids[i])
		if err != nil {
			return nil, err
		}
		texts[i] = text
	}
	return texts, nil
}

// parameterText writes a JSON value as the text of a parameter of type oid; nil is NULL. The server
// parses it as a value of that type and as nothing else.
func parameterText(value any, oid uint32) ([]byte, error) {
	if value == nil {
		return nil, nil
	}
	if oid == pgtype.JSONOID || oid == pgtype.JSONBOID {
		return json.Marshal(value)
	}
	switch v := value.(type) {
	case string:
		return []byte(v), nil
	case json.Number:
		return []byte(v.String()), nil
	case bool:
		return fmt.Append(nil, v), nil
	case []any:
		if slices.Contains([]uint32{pgtype.TextOID, pgtype.VarcharOID, pgtype.BPCharOID}, oid) {
			return json.Marshal(v)
		}
		var b strings.Builder
		err := arrayText(&b, v)
		return []byte(b.String()), err
	}
	return json.Marshal(value)
}

// arrayText writes a PostgreSQL array literal, every element quoted.
func arrayText(b *strings.Builder, items []any) error {
	b.WriteByte('{')
	for i, item := range items {
		if i > 0 {
			b.WriteByte(',')
		}
		if nested, ok := item.([]any); ok {
			if err := arrayText(b, nested); err != nil {
				return err
			}
			continue
		}
		text, err := parameterText(item, 0)
		switch {
		case err != nil:
			return err
		case text == nil:
			b.WriteString("NULL")
		default:
			b.WriteString(`"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(string(text)) + `"`)
		}
	}
	b.WriteByte('}')
	return nil
}
