package skills

import (
	"context"
	"encoding/json"
	"fmt"
	"math/big"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/lanekeeper/lanekeeper/internal/fielderr"
)

// checkPlaceholders returns the @names of the query that are not parameters, and the parameters that it does not use.
func checkPlaceholders(query string, parameters []string) fielderr.List {
	var problems fielderr.List
	used := placeholders(query)
	for _, name := range used {
		if !slices.Contains(parameters, name) {
			problems.Add("config.query", "@%s is not declared under parameters.properties", name)
		}
	}
	for _, name := range parameters {
		if !slices.Contains(used, name) {
			problems.Add("parameters.properties."+name, "the query does not use @%s", name)
		}
	}
	return problems
}

var placeholderRegexp = regexp.MustCompile(`@([\pL_][\pL\pN_]*)`)

// placeholders lists the @names of a query outside strings and comments. It uses the parser of pgx, which replaces them
// at the call.
func placeholders(query string) []string {
	var names []string
	for _, match := range placeholderRegexp.FindAllStringSubmatch(query, -1) {
		name := match[1]
		probe := pgx.NamedArgs{name: true} //nolint:forbidigo // this probes one name; the call itself is strict
		_, args, err := probe.RewriteQuery(context.Background(), nil, query, nil)
		if err == nil && slices.Contains(args, true) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// bind replaces the @names in text by $numbers and returns their values.
func (h sqlHandler) bind(ctx context.Context, text string, args map[string]any) (string, []any, error) {
	named := make(pgx.StrictNamedArgs)
	for _, name := range placeholders(h.query) {
		named[name] = args[name] // an absent argument without a default is NULL
	}
	return named.RewriteQuery(ctx, nil, text, nil)
}

// parameterTexts encodes values for parameters of the given types.
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

// parameterText encodes a JSON value as text, which the server parses as type oid. It returns nil for NULL.
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
		if slices.Contains([]uint32{pgtype.Int2OID, pgtype.Int4OID, pgtype.Int8OID}, oid) {
			return []byte(integerText(v)), nil
		}
		return []byte(v.String()), nil
	case bool:
		return fmt.Append(nil, v), nil
	case []any:
		if slices.Contains([]uint32{pgtype.TextOID, pgtype.VarcharOID, pgtype.BPCharOID}, oid) {
			return json.Marshal(v)
		}
		var b strings.Builder
		err := arrayText(&b, v, integerElements[oid])
		return []byte(b.String()), err
	}
	return json.Marshal(value)
}

// integerElements are the element types of the integer arrays.
var integerElements = map[uint32]uint32{
	pgtype.Int2ArrayOID: pgtype.Int2OID, pgtype.Int4ArrayOID: pgtype.Int4OID, pgtype.Int8ArrayOID: pgtype.Int8OID,
}

// integerText writes a whole number without a point or an exponent. JSON Schema accepts 2.0 as an integer; PostgreSQL
// does not.
func integerText(n json.Number) string {
	if exact, ok := new(big.Rat).SetString(n.String()); ok && exact.IsInt() {
		return exact.Num().String()
	}
	return n.String()
}

// arrayText writes a PostgreSQL array literal with every element quoted. oid is the type of the elements, if known.
func arrayText(b *strings.Builder, items []any, oid uint32) error {
	b.WriteByte('{')
	for i, item := range items {
		if i > 0 {
			b.WriteByte(',')
		}
		if nested, ok := item.([]any); ok {
			if err := arrayText(b, nested, oid); err != nil {
				return err
			}
			continue
		}
		text, err := parameterText(item, oid)
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
