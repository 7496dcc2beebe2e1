package trace_test

import (
	"encoding/hex"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	suffix = "01JD3V7K8ZQ6W2M5T9X4C1B0AE"
	good   = trace.ID("hb_" + suffix)
)

var prefixes = map[trace.Surface]string{
	trace.Heartbeat: "hb", trace.Operate: "op", trace.Chat: "ch", trace.Webhook: "wh", trace.Flow: "fl", trace.Eval: "ev",
}

func TestNewIsReadBack(t *testing.T) {
	t.Parallel()
	for surface, prefix := range prefixes {
		t.Run(string(surface), func(t *testing.T) {
			before := time.Now().Add(-time.Millisecond)
			id := trace.New(surface)
			assert.Equal(t, prefix+"_"+id.Suffix(), string(id), id)
			assert.Equal(t, strings.ToUpper(string(id[3:])), string(id[3:]), id)
			assert.Equal(t, surface, id.Surface())
			if made := id.Time(); made.Before(before) || made.After(time.Now()) || made.Location() != time.UTC {
				t.Errorf("Time = %v, want now in UTC", made)
			}
			parsed, err := trace.Parse(string(id))
			assert.NoError(t, err)
			assert.Equal(t, id, parsed)
		})
	}
}

func TestNewRefusesAnUnknownSurface(t *testing.T) {
	t.Parallel()
	defer func() {
		assert.True(t, recover() != nil, "New gave an id to a surface that does not exist")
	}()
	trace.New("email")
}

// Two ids of one millisecond must not be adjacent. Otherwise one would reveal the other.
func TestNewIsRandom(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seen := map[string]bool{}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 500 {
				random := hex.EncodeToString(trace.New(trace.Chat).ULID().Entropy()[:8])
				mu.Lock()
				assert.Truef(t, !seen[random], "the upper 64 random bits %s came twice", random)
				seen[random] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
}

func TestParseNormalises(t *testing.T) {
	t.Parallel()
	for _, s := range []string{string(good), strings.ToLower(string(good)), strings.ToUpper(string(good))} {
		id, err := trace.Parse(s)
		assert.NoError(t, err, s)
		assert.Equal(t, good, id, s)
	}
}

func TestParseNamesTheError(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ in, want string }{
		"empty":        {"", "no surface prefix"},
		"bare ulid":    {suffix, "no surface prefix"},
		"no prefix":    {"_" + suffix, `prefix "" is not one of hb, op, ch, wh, fl, ev`},
		"other prefix": {"xx_" + suffix, `prefix "xx" is not one of hb, op, ch, wh, fl, ev`},
		"short":        {"hb_01JD3V", "26 characters, this has 6"},
		"long":         {string(good) + "0", "26 characters, this has 27"},
		"very long":    {strings.Repeat("hb_", 1<<16), "too long"},
		"letter":       {"hb_01JD3V7K8ZQ6W2M5T9X4C1B0AU", "without I, L, O and U"},
		"overflow":     {"hb_81JD3V7K8ZQ6W2M5T9X4C1B0AE", "at most 7"},
		"zero":         {"hb_00000000000000000000000000", "zero"},
		"space":        {"hb_ 1JD3V7K8ZQ6W2M5T9X4C1B0AE", "without I, L, O and U"},
		"not utf-8":    {"hb_\xff1JD3V7K8ZQ6W2M5T9X4C1B0AE", "without I, L, O and U"},
	} {
		t.Run(name, func(t *testing.T) {
			id, err := trace.Parse(c.in)
			require.Truef(t, errors.Is(err, trace.ErrInvalid) && id == "", "Parse(%q) = %q, %v, want ErrInvalid", c.in, id, err)
			assert.Contains(t, err.Error(), c.want, "looks like "+string(good))
			assert.Truef(t, len(err.Error()) <= 300, "error has %d bytes", len(err.Error()))
		})
	}
}

func TestParseAny(t *testing.T) {
	t.Parallel()
	all := []trace.ID{good, "op_" + suffix, "ch_" + suffix, "wh_" + suffix, "fl_" + suffix, "ev_" + suffix}
	for name, c := range map[string]struct {
		in   string
		want []trace.ID
	}{
		"prefixed":       {string(good), []trace.ID{good}},
		"prefixed lower": {strings.ToLower(string(good)), []trace.ID{good}},
		"hex":            {good.OTel(), all},
		"hex upper":      {strings.ToUpper(good.OTel()), all},
		"bare ulid":      {suffix, all},
		"bare lower":     {strings.ToLower(suffix), all},
		"imported":       {"hb_m3k9f2_a7x2p1", []trace.ID{"hb_m3k9f2_a7x2p1"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := trace.ParseAny(c.in)
			require.NoError(t, err)
			assert.NoDiff(t, c.want, got)
		})
	}
	for name, in := range map[string]string{
		"empty": "", "zero hex": strings.Repeat("0", 32), "not hex": strings.Repeat("g", 32),
		"31 digits": strings.Repeat("a", 31), "33 digits": strings.Repeat("a", 33),
		"zero ulid": strings.Repeat("0", 26), "bad ulid": strings.Repeat("U", 26),
	} {
		t.Run(name, func(t *testing.T) {
			got, err := trace.ParseAny(in)
			assert.Truef(t, errors.Is(err, trace.ErrInvalid), "ParseAny(%q) = %v, %v, want ErrInvalid", in, got, err)
		})
	}
}

func TestOTelIsTheSameSixteenBytes(t *testing.T) {
	t.Parallel()
	u := good.ULID()
	if got, want := good.OTel(), hex.EncodeToString(u[:]); got != want || len(got) != 32 {
		t.Errorf("OTel = %q, want %q", got, want)
	}
	assert.Equal(t, suffix, good.Suffix())
}

func TestIDsSortByTime(t *testing.T) {
	t.Parallel()
	older, newer := good, trace.New(trace.Heartbeat)
	ids := []trace.ID{newer, older}
	slices.Sort(ids)
	assert.Truef(t, ids[0] == older && older.Time().Before(newer.Time()), "sorted: %v", ids)
}

func TestMethodsOfAnInvalidID(t *testing.T) {
	t.Parallel()
	for _, id := range []trace.ID{"", "hb_", "xx_" + suffix, "hb-" + suffix, trace.ID(strings.ToLower(string(good)))} {
		assert.Truef(t, !id.Valid() && id.Surface() == "" && id.Suffix() == "" && id.OTel() == "" && id.Time().IsZero() &&
			id.ULID().IsZero(), "%q passes for a trace id", id)
	}
	assert.Truef(t, good.Valid(), "%q is not valid", good)
}

func TestParseSurface(t *testing.T) {
	t.Parallel()
	for surface, prefix := range prefixes {
		for _, name := range []string{string(surface), prefix} {
			got, err := trace.ParseSurface(name)
			assert.Truef(t, err == nil && got == surface, "ParseSurface(%q) = %q, %v", name, got, err)
		}
	}
	for _, name := range []string{"", "Heartbeat", "cron"} {
		_, err := trace.ParseSurface(name)
		assert.ErrorContains(t, err, "heartbeat, operate, chat, webhook, flow", name)
	}
}

func TestContext(t *testing.T) {
	t.Parallel()
	if span, ok := trace.From(t.Context()); ok || span != (trace.Span{}) {
		t.Errorf("From(empty) = %+v, %v", span, ok)
	}
	span := trace.Span{
		TraceID: good, ExecutionID: "e1", ActivityID: "a1", Lane: "heartbeat",
		Surface: trace.Heartbeat, Agent: "agent",
	}
	ctx := trace.With(t.Context(), span)
	child := trace.WithLane(trace.WithActivity(ctx, "a2"), "objective:7")

	got, ok := trace.From(ctx)
	assert.Truef(t, ok && got == span, "From = %+v, %v, want %+v: a derived context changed its parent", got, ok, span)
	want := span
	want.ActivityID, want.Lane = "a2", "objective:7"
	got, ok = trace.From(child)
	assert.Truef(t, ok && got == want, "From(child) = %+v, %v, want %+v", got, ok, want)
	assert.True(t, trace.IDFrom(child) == good && trace.IDFrom(t.Context()) == "", "IDFrom and From differ")
	got, ok = trace.From(trace.WithLane(t.Context(), "pipeline:prices"))
	assert.Truef(t, !ok && got.Lane == "pipeline:prices", "lane without a trace: %+v, %v", got, ok)
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{string(good), suffix, good.OTel(), "", "hb_", "HB_" + strings.ToLower(suffix), "wh_\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, err := trace.Parse(s)
		if err == nil {
			assert.Truef(t, id.Valid() && strings.EqualFold(string(id), s), "Parse(%q) = %q", s, id)
			again, err := trace.Parse(string(id))
			assert.Truef(t, err == nil && again == id, "Parse(%q) = %q, %v: not stable", id, again, err)
			if ids, err := trace.ParseAny(id.OTel()); err != nil || !slices.Contains(ids, id) {
				t.Errorf("ParseAny(%q) = %v, %v, want %q among them", id.OTel(), ids, err, id)
			}
		}
		ids, anyErr := trace.ParseAny(s)
		assert.Truef(t, err != nil || anyErr == nil && slices.Contains(ids, id),
			"ParseAny(%q) = %v, %v, Parse gives %q", s, ids, anyErr, id)
		for _, id := range ids {
			assert.Truef(t, id.Valid() || string(id) == s, "ParseAny(%q) gives %q", s, id)
		}
	})
}

func TestSpanIDIsTheEndOfTheRowID(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "9def0123456789ab", trace.SpanID("01940f5e-7c1a-7abc-9DEF-0123456789ab"))
	for _, parts := range [][]string{{"no uuid"}, {""}, {"01940f5e-7c1a-7abc-0000-000000000000"}, {"a", "b"}} {
		got := trace.SpanID(parts...)
		assert.Truef(t, len(got) == 16 && strings.Trim(got, "0123456789abcdef") == "" && strings.Trim(got, "0") != "",
			"SpanID(%q) = %q", parts, got)
	}
	assert.True(t, trace.SpanID("a", "b") != trace.SpanID("a", "c"), "different parts have one span id")
}

func TestTraceparentNamesTheInnermostSpan(t *testing.T) {
	t.Parallel()
	const activity, execution = "01940f5e-7c1a-7abc-9def-0123456789ab", "01940f5e-7c1a-7abc-8aaa-0123456789ab"
	span := trace.Span{TraceID: good, ExecutionID: execution, ActivityID: activity}
	if got, want := trace.Traceparent(trace.With(t.Context(), span)), "00-"+good.OTel()+
		"-9def0123456789ab-01"; got != want {
		t.Errorf("in an activity %q, want %q", got, want)
	}
	span.ActivityID = ""
	if got, want := trace.Traceparent(trace.With(t.Context(), span)), "00-"+good.OTel()+
		"-8aaa0123456789ab-01"; got != want {
		t.Errorf("in an execution %q, want %q", got, want)
	}
	span.ExecutionID = ""
	_, ok := trace.ParseTraceparent(trace.Traceparent(trace.With(t.Context(), span)))
	assert.True(t, ok, "a trace alone has no valid traceparent")
	assert.Equal(t, "", trace.Traceparent(t.Context()))
}

func TestParseTraceparent(t *testing.T) {
	t.Parallel()
	const id, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	for header, want := range map[string]bool{
		"00-" + id + "-" + span + "-01":                           true,
		"00-" + id + "-" + span + "-00":                           true,
		"cc-" + id + "-" + span + "-01-what.a.later.version.adds": true,
		"cc-" + id + "-" + span + "-01x":                          false,
		"00-" + id + "-" + span + "-01-more":                      false,
		"ff-" + id + "-" + span + "-01":                           false,
		"00-" + strings.ToUpper(id) + "-" + span + "-01":          false,
		"00-" + strings.Repeat("0", 32) + "-" + span + "-01":      false,
		"00-" + id + "-" + strings.Repeat("0", 16) + "-01":        false,
		"00_" + id + "-" + span + "-01":                           false,
		"":                                                        false, "00": false, "cc-" + id + "-" + span + "-01-" +
			strings.Repeat("a", 200): false,
	} {
		got, ok := trace.ParseTraceparent(header)
		if ok != want || ok && (got.TraceID != id || got.SpanID != span || got.Sampled != strings.Contains(header, "-01")) {
			t.Errorf("ParseTraceparent(%q) = %+v, %v, want %v", header, got, ok, want)
		}
	}
}

func FuzzParseTraceparent(f *testing.F) {
	f.Add("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
	f.Fuzz(func(t *testing.T, header string) {
		got, ok := trace.ParseTraceparent(header)
		assert.Truef(t, !ok || len(got.TraceID) == 32 && len(got.SpanID) == 16, "%q gives %+v", header, got)
	})
}
