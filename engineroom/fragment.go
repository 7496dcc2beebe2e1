package engineroom

import (
	"context"
	"encoding/hex"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/trace"
)

// A part of an id finds the id. A beginning is a range of the index, so it finds ids of any age; with an end, it
// searches the newest maxFragments ids of the range. Queries compare any other part with the newest ids only, in index
// order, because an index of endings would slow every insert.
const (
	// maxFragments bounds the executions or traces that a query compares with a part of an id. maxOtherFragments bounds
	// the rows of another table.
	maxFragments      = 30_000
	maxOtherFragments = 10_000
	// minFragment is the least length of a part of an id.
	minFragment = 4
	// maxMatches bounds the ids that match a part.
	maxMatches = 50
)

// fragment is a pasted part of an id: the whole id, its beginning, its end, or both with … between them.
type fragment struct {
	begin, end string // end is empty without an ellipsis
	surface    string // a prefix of tracePrefixes, if the part begins like a trace id
}

// tracePrefixes are the prefixes of trace ids, before the underscore.
var tracePrefixes = func() (prefixes []string) {
	for _, surface := range trace.Surfaces() {
		prefixes = append(prefixes, trace.Surface(surface).Prefix())
	}
	return prefixes
}()

// fragmentOf parses a pasted id. In a URL, the id is the last segment of the path. ok is false for text that is no part
// of an id.
func fragmentOf(text string) (f fragment, ok bool) {
	text = strings.Trim(strings.TrimSpace(text), "\"'`<>()[]{},;:#")
	if at, err := url.Parse(text); err == nil && (at.Host != "" || strings.HasPrefix(text, "/")) {
		text = strings.Trim(at.Path, "/")
		text = text[strings.LastIndexByte(text, '/')+1:]
	}
	text = strings.ReplaceAll(text, "...", "…")
	begin, end, abbreviated := strings.Cut(text, "…")
	if len(begin) > 2 && begin[2] == '_' && slices.Contains(tracePrefixes, strings.ToLower(begin[:2])) {
		f.surface, begin = strings.ToLower(begin[:2]), begin[3:]
	}
	f.begin, f.end = begin, end
	isForeign := func(r rune) bool {
		return (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && r != '-'
	}
	plausible := !strings.ContainsFunc(begin+end, isForeign) && len(begin+end) <= 36
	if f.surface != "" || abbreviated {
		_, _, pattern := f.ulidRange()
		return f, plausible && (f.surface != "" && pattern != "" || f.surface == "" && len(begin+end) >= minFragment)
	}
	// A lower-case text without a digit is a word, though some words are also hex digits.
	return f, plausible && len(begin) >= minFragment &&
		(strings.ContainsAny(begin, "0123456789") || begin == strings.ToUpper(begin))
}

// hexRange returns the first and the last uuid with the beginning, and a LIKE pattern for a uuid's hex digits. All
// three are empty for text that is no part of a uuid.
func (f fragment) hexRange() (low, high, pattern string) {
	begin, end := hexDigits(f.begin), hexDigits(f.end)
	if f.surface != "" || strings.Trim(begin+end, "0123456789abcdef") != "" || len(begin+end) > 32 || begin+end == "" {
		return "", "", ""
	}
	if begin != "" {
		low, high = asUUID(begin, "0"), asUUID(begin, "f")
	}
	if f.end == "" {
		return low, high, "%" + begin + "%"
	}
	return low, high, begin + "%" + end
}

// wholeBytes returns the whole bytes of the longer part. even assumes that the part starts at a byte of the uuid, odd
// that it starts in the middle of a byte.
func (f fragment) wholeBytes() (even, odd []byte) {
	part := hexDigits(f.begin)
	if end := hexDigits(f.end); len(end) > len(part) {
		part = end
	}
	return bytesOf(part), bytesOf(part[min(len(part), 1):])
}

// bytesOf decodes the whole bytes of hex digits.
func bytesOf(digits string) []byte {
	b, err := hex.DecodeString(digits[:len(digits)/2*2])
	if err != nil {
		return []byte{} // every uuid contains the empty string
	}
	return b
}

func hexDigits(s string) string { return strings.ToLower(strings.ReplaceAll(s, "-", "")) }

// asUUID returns the uuid with a given beginning and the digit fill in all other places.
func asUUID(begin, fill string) string {
	h := begin + strings.Repeat(fill, 32-len(begin))
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// ulidRange is hexRange for the part of a trace id after its surface.
func (f fragment) ulidRange() (low, high, pattern string) {
	begin, end := strings.ToUpper(f.begin), strings.ToUpper(f.end)
	const all = 26
	if strings.Trim(begin+end, "0123456789ABCDEFGHJKMNPQRSTVWXYZ") != "" || len(begin+end) > all {
		return "", "", ""
	}
	if begin != "" || f.surface != "" {
		low, high = begin+strings.Repeat("0", all-len(begin)), begin+strings.Repeat("Z", all-len(begin))
	}
	if f.end == "" {
		return low, high, "%" + begin + "%"
	}
	return low, high, begin + "%" + end
}

// surfaces lists the possible prefixes of the trace id.
func (f fragment) surfaces() []string {
	if f.surface != "" {
		return []string{f.surface}
	}
	return tracePrefixes
}

// idTables are the tables whose rows a part of their uuid finds. The statement needs the tables' names as constants.
var idTables = []string{
	"agent_executions", "agent_approvals", "agent_webhook_deliveries", "agent_webhook_outbox", "agent_eval_runs",
}

// matchUUIDs returns the ids of a table of idTables with a part, newest first, at most limit.
func (room *Room) matchUUIDs(ctx context.Context, table string, f fragment, limit int) ([]string, error) {
	low, high, pattern := f.hexRange()
	if pattern == "" || !slices.Contains(idTables, table) {
		return nil, nil
	}
	window := maxOtherFragments
	if table == "agent_executions" {
		window = maxFragments
	}
	if f.begin != "" && (f.end != "" || len(hexDigits(f.begin)) == 32) || strings.ToLower(f.begin+f.end) != f.begin+f.end {
		window = 0 // the range has all matches, or no page shows a uuid in this form
	}
	// The query compares bytes first, because that decides for almost every id. Only then it formats the id.
	even, odd := f.wholeBytes()
	return postgres.Values[string](ctx, room.Read, "find ids", `
		select x.id::text from (
		  (select r.id
		     from (select t.id from `+table+` t
		            where @low <> '' and t.id between nullif(@low, '')::uuid and nullif(@high, '')::uuid
		            order by t.id desc limit @searched) r
		    where not @cut or encode(uuid_send(r.id), 'hex') like @pattern
		    order by r.id desc limit @limit)
		  union
		  (select n.id
		     from (select t.id from `+table+` t order by t.id desc limit @window) n
		    where case when position(@even::bytea in uuid_send(n.id)) > 0 or position(@odd::bytea in uuid_send(n.id)) > 0
		               then encode(uuid_send(n.id), 'hex') like @pattern end
		    order by n.id desc limit @limit)) x
		 order by x.id desc limit @limit`, customPlan, postgres.Strict{
		"low": low, "high": high, "pattern": pattern, "cut": f.end != "", "limit": limit,
		"searched": maxFragments, "window": window, "even": even, "odd": odd,
	})
}

// matchTraces returns at most limit ids of traces. The trace id, or the id of an action of the trace, contains the
// part, or the trace has one of runs. runs are the executions whose ids contain the part.
func (room *Room) matchTraces(ctx context.Context, f fragment, runs []string, limit int) ([]string, error) {
	found, err := room.matchTraceIDs(ctx, f, limit)
	if err != nil {
		return nil, err
	}
	low, high, _ := f.hexRange()
	if len(hexDigits(f.begin)) < 8 {
		low = "" // too many actions have such a beginning
	}
	traces, err := postgres.Values[string](ctx, room.Read, "find traces", `
		(select e.trace_id from agent_executions e where e.id = any (@ids::text[]::uuid[]))
		union
		(select a.trace_id from agent_activity a
		  where @low <> '' and a.id between nullif(@low, '')::uuid and nullif(@high, '')::uuid
		  order by a.id desc limit @limit)`,
		customPlan, postgres.Strict{"ids": runs, "low": low, "high": high, "limit": limit})
	for _, id := range traces {
		if !slices.Contains(found, id) && len(found) < limit {
			found = append(found, id)
		}
	}
	return found, err
}

// matchTraceIDs returns the ids of traces with a part, newest first, at most limit.
func (room *Room) matchTraceIDs(ctx context.Context, f fragment, limit int) ([]string, error) {
	if ids, err := trace.ParseAny(strings.TrimSpace(f.whole())); err == nil {
		list := make([]string, len(ids))
		for i, id := range ids {
			list[i] = string(id)
		}
		found, err := postgres.Values[string](ctx, room.Read, "find traces", `
			select i.id from unnest(@ids::text[]) i (id)
			 where exists (select from agent_executions e where e.trace_id = i.id)
			    or exists (select from agent_activity a where a.trace_id = i.id)`, customPlan, postgres.Strict{"ids": list})
		if err != nil || len(found) > 0 {
			return found, err
		}
	}
	low, high, pattern := f.ulidRange()
	if pattern == "" {
		return nil, nil
	}
	window := maxFragments / len(f.surfaces())
	if f.surface == "" && strings.ToUpper(f.begin+f.end) != f.begin+f.end {
		window = 0 // no page shows a trace id in this form
	}
	part := strings.ToUpper(f.begin)
	if end := strings.ToUpper(f.end); len(end) > len(part) {
		part = end
	}
	return postgres.Values[string](ctx, room.Read, "find traces", `
		select x.trace_id from unnest(@surfaces::text[]) s (surface) cross join lateral (
		  (select r.trace_id from (select e.trace_id from agent_executions e
		      where @ranged and e.trace_id between s.surface || '_' || @low and s.surface || '_' || @high
		      order by e.trace_id desc limit case when @cut then @searched else 10 * @limit end) r
		    where not @cut or substr(r.trace_id, 4) like @pattern)
		  union
		  (select r.trace_id from (select a.trace_id from agent_activity a
		      where @ranged and a.trace_id between s.surface || '_' || @low and s.surface || '_' || @high
		      order by a.trace_id desc limit 10 * @limit) r
		    where not @cut or substr(r.trace_id, 4) like @pattern)
		  union
		  (select n.trace_id from (select e.trace_id from agent_executions e
		      where not (@cut and @ranged) and e.trace_id between s.surface || '_' and s.surface || '_' || repeat('Z', 26)
		      order by e.trace_id desc limit @window) n
		    where case when strpos(n.trace_id, @part) > 0 then substr(n.trace_id, 4) like @pattern end)) x
		 order by substr(x.trace_id, 4) collate "C" desc limit @limit`, customPlan, postgres.Strict{
		"low": low, "high": high, "ranged": low != "", "pattern": pattern, "cut": f.end != "", "part": part, "limit": limit,
		"searched": maxFragments, "window": window, "surfaces": f.surfaces(),
	})
}

// whole returns the fragment as one text; empty with an ellipsis.
func (f fragment) whole() string {
	switch {
	case f.end != "":
		return ""
	case f.surface != "":
		return f.surface + "_" + f.begin
	}
	return f.begin
}

// containsPattern returns the LIKE pattern for texts that contain a text. An empty pattern matches all.
func containsPattern(text string) string {
	if text == "" {
		return ""
	}
	return "%" + strings.TrimSuffix(prefixPattern(text), "%") + "%"
}

// resolvePartialID resolves an address with a part of an id or name. It returns the address of the only match, or of
// the page Find with all matches. For an error without a wrong id, it returns an empty address.
func (room *Room) resolvePartialID(ctx context.Context, p page, req *pageRequest, err error) string {
	prob, _ := problem.Of(err)
	if prob.Status != http.StatusNotFound && prob.Status != http.StatusBadRequest {
		return ""
	}
	kind, ok := findersByPath[p.path]
	name := wildcard.FindStringSubmatch(p.path)
	if !ok || name == nil || !(&pageData{pageRequest: req}).hasValidPath(p) || len(req.Query) > 0 {
		return ""
	}
	text := req.path(name[1])
	q, ok := newFindQuery(text)
	if !ok {
		return ""
	}
	hits, err := kind(room, ctx, q)
	switch f, id := fragmentOf(text); {
	case err != nil:
		return ""
	case len(hits) == 1 &&
		hits[0].Href == (&url.URL{Path: strings.Replace(p.path, "{"+name[1]+"}", text, 1)}).EscapedPath():
		return "" // the page exists, but not an item on it
	case len(hits) == 1:
		return hits[0].Href
	case len(hits) == 0 && (!id || f.isWhole()):
		return "" // the name or whole id does not exist
	}
	return "/find?q=" + url.QueryEscape(text)
}

// isWhole reports whether the fragment is a whole id.
func (f fragment) isWhole() bool {
	if _, err := trace.ParseAny(f.whole()); err == nil {
		return true
	}
	return uuidPattern.MatchString(strings.ToLower(f.whole()))
}

// tracesFor returns the ids of the traces that a pasted text stands for; empty for none, nil without a text.
func (room *Room) tracesFor(ctx context.Context, text string) ([]string, error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return nil, nil
	}
	f, _ := fragmentOf(text)
	runs, err := room.matchUUIDs(ctx, "agent_executions", f, maxMatches)
	if err != nil {
		return nil, err
	}
	found, err := room.matchTraces(ctx, f, runs, maxMatches)
	if found == nil {
		found = []string{}
	}
	return found, err
}

// runsFor returns the traces and the executions that a pasted text stands for. Both are nil without a text.
func (room *Room) runsFor(ctx context.Context, text string) (traces, ids []string, err error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return nil, nil, nil
	}
	f, _ := fragmentOf(text)
	if ids, err = room.matchUUIDs(ctx, "agent_executions", f, maxMatches); err != nil {
		return nil, nil, err
	}
	if traces, err = room.matchTraceIDs(ctx, f, maxMatches); traces == nil {
		traces = []string{}
	}
	return traces, ids, err
}
