package api

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// maxCSV bounds the rows of a table.
const maxCSV = 10_000

// csvParam selects the format of a listing.
var csvParam = enumParam("format", "json (default), or csv: a table of at most 10,000 rows from cursor on, or of limit. "+
	"Accept: text/csv does the same", "json", "csv")

// wantsCSV reports a request for a table.
func wantsCSV(rt route, in request) bool {
	if !rt.csv {
		return false
	}
	accept := in.Header.Get("Accept")
	return in.query["format"] == "csv" || in.query["format"] == "" && strings.Contains(accept, "text/csv") &&
		!strings.Contains(accept, "application/json")
}

// writeCSV reads the pages of a listing and writes them as one table. It encodes the whole table before it sends the
// first byte.
func (s *server) writeCSV(w http.ResponseWriter, r *http.Request, rt route, in request) {
	table, err := s.csvTable(rt, in)
	if err != nil {
		s.writeError(w, r, rt, err, "")
		return
	}
	name := rt.path[strings.LastIndexByte(rt.path, '/')+1:]
	w.Header().Set("Content-Type", "text/csv; charset=utf-8; header=present")
	w.Header().Set("Content-Disposition", `attachment; filename="`+name+`.csv"`)
	w.Header().Set("Content-Length", strconv.Itoa(len(table)))
	if _, err := w.Write(table); err != nil {
		s.log.DebugContext(r.Context(), "client went away", "path", problem.Path(r), "error", err)
	}
}

func (s *server) csvTable(rt route, in request) ([]byte, error) {
	var b bytes.Buffer
	out := csv.NewWriter(&b)
	most := maxCSV
	if in.query["limit"] != "" {
		most = in.query.limit()
	}
	in.query, in.csv = maps.Clone(in.query), true
	var columns []string
	for rows := 0; rows < most; {
		in.query["limit"] = strconv.Itoa(min(most-rows, maxPage))
		got, _, err := s.handle(rt, in)
		if err != nil {
			return nil, err
		}
		page := reflect.ValueOf(got.body)
		items := page.FieldByName("Items")
		if columns == nil {
			columns = csvColumns(items.Type().Elem())
			if err := out.Write(columns); err != nil {
				return nil, fmt.Errorf("write table: %w", err)
			}
		}
		for i := range items.Len() {
			cells, err := csvCells(items.Index(i).Interface(), columns)
			if err == nil {
				err = out.Write(cells)
			}
			if err != nil {
				return nil, fmt.Errorf("write table: %w", err)
			}
		}
		rows += items.Len()
		next, _ := reflect.TypeAssert[*string](page.FieldByName("NextCursor"))
		if next == nil {
			break
		}
		in.query["cursor"] = *next
	}
	out.Flush()
	return b.Bytes(), out.Error()
}

// csvColumns returns the JSON names of a row's fields, without fields that hold JSON of any size.
func csvColumns(row reflect.Type) []string {
	var names []string
	for _, f := range reflect.VisibleFields(row) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" || name == "-" || f.Type == reflect.TypeFor[json.RawMessage]() {
			continue
		}
		names = append(names, name)
	}
	return names
}

func csvCells(row any, columns []string) ([]string, error) {
	text, err := encode(row)
	if err != nil {
		return nil, err
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		return nil, err
	}
	cells := make([]string, len(columns))
	for i, name := range columns {
		value := fields[name]
		switch {
		case len(value) == 0 || string(value) == "null":
		case value[0] == '"':
			if err := json.Unmarshal(value, &cells[i]); err != nil {
				return nil, err
			}
			cells[i] = harmlessCell(cells[i])
		default:
			cells[i] = string(value) // a number, true, false, or JSON, which no spreadsheet calculates
		}
	}
	return cells, nil
}

// harmlessCell puts an apostrophe before a text that a spreadsheet would calculate.
func harmlessCell(text string) string {
	if strings.HasPrefix(strings.TrimLeft(text, " \t\r\n\u00a0\ufeff"), "=") || text != "" &&
		strings.ContainsRune("+-@\t\r\n＝＋－＠", []rune(text)[0]) {
		return "'" + text
	}
	return text
}
