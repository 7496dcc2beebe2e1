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
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// maxCSVRows limits a CSV response.
const maxCSVRows = 10_000

// csvParam selects the format of a listing.
var csvParam = enumParam("format", "json (default) or csv. csv returns up to limit rows, or 10,000 without limit; "+
	"the header Link names the next table. Accept: text/csv selects csv, too", "json", "csv")

// wantsCSV reports whether the client asked for CSV.
func wantsCSV(rt route, req request) bool {
	if !rt.csv {
		return false
	}
	accept := req.Header.Get("Accept")
	return req.query["format"] == "csv" || req.query["format"] == "" && strings.Contains(accept, "text/csv") &&
		!strings.Contains(accept, "application/json")
}

// writeCSV reads the pages of a listing and writes them as one table. It encodes the whole table before it sends the
// first byte, so an error can still become a problem response.
func (s *server) writeCSV(w http.ResponseWriter, r *http.Request, rt route, req request) {
	table, next, err := s.csvTable(rt, req)
	if err != nil {
		s.writeError(w, r, rt, err, "")
		return
	}
	if next != "" {
		query := r.URL.Query()
		query.Set("cursor", next)
		w.Header().Set("Link", "<"+r.URL.EscapedPath()+"?"+query.Encode()+`>; rel="next"`)
	}
	name := rt.path[strings.LastIndexByte(rt.path, '/')+1:]
	w.Header().Set("Content-Type", "text/csv; charset=utf-8; header=present")
	w.Header().Set("Content-Disposition", `attachment; filename="`+name+`.csv"`)
	w.Header().Set("Content-Length", strconv.Itoa(len(table)))
	if _, err := w.Write(table); err != nil {
		s.log.DebugContext(r.Context(), "write response", "path", problem.Path(r), "error", err)
	}
}

// csvTable returns the table, and the cursor of its next part if the limit or the request's time cuts it.
func (s *server) csvTable(rt route, req request) (table []byte, next string, err error) {
	var b bytes.Buffer
	out := csv.NewWriter(&b)
	limit := maxCSVRows
	if req.query["limit"] != "" {
		limit = req.query.limit()
	}
	req.query, req.csv = maps.Clone(req.query), true
	var columns []string
	deadline, limited := req.Context().Deadline()
	for rows := 0; rows < limit && (columns == nil || !limited || time.Until(deadline) > bulkMargin); {
		req.query["limit"] = strconv.Itoa(min(limit-rows, maxPage))
		resp, _, err := s.dispatch(rt, req)
		if err != nil {
			return nil, "", err
		}
		page := reflect.ValueOf(resp.body)
		items := page.FieldByName("Items")
		if columns == nil {
			columns = csvColumns(items.Type().Elem())
			if err := out.Write(columns); err != nil {
				return nil, "", fmt.Errorf("write table: %w", err)
			}
		}
		for i := range items.Len() {
			cells, err := csvCells(items.Index(i).Interface(), columns)
			if err == nil {
				err = out.Write(cells)
			}
			if err != nil {
				return nil, "", fmt.Errorf("write table: %w", err)
			}
		}
		rows += items.Len()
		cursor, _ := reflect.TypeAssert[*string](page.FieldByName("NextCursor"))
		if next = postgres.Deref(cursor); next == "" {
			break
		}
		req.query["cursor"] = next
	}
	out.Flush()
	return b.Bytes(), next, out.Error()
}

// csvColumns returns the JSON names of a row's fields. It omits json.RawMessage fields.
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

// csvCells returns the columns of a row, as its JSON has them. A null or absent column is empty.
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
			cells[i] = escapeFormula(cells[i])
		default:
			cells[i] = string(value) // a number, true, false or JSON: spreadsheets do not evaluate it
		}
	}
	return cells, nil
}

// escapeFormula escapes formula injection (CSV injection): it puts an apostrophe before a text that a spreadsheet
// would evaluate.
func escapeFormula(text string) string {
	if strings.IndexAny(strings.TrimLeft(text, " \u00a0\ufeff"), "=+-@\t\r\n＝＋－＠") == 0 {
		return "'" + text
	}
	return text
}
