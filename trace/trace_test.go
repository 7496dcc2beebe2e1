package trace_test

import (
	"encoding/hex"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	suffix = "01JD3V7K8ZQ6W2M5T9X4C1B0AE"
	good   = trace.ID("hb_" + suffix)
)

var prefixes = map[trace.Surface]string{
	trace.Heartbeat: "hb", trace.Operate: "op", trace.Chat: "ch", trace.Webhook: "wh", trace.Flow: "fl",
}

func TestNewIsReadBack(t *testing.T) {
	t.Parallel()
	for surface, prefix := range prefixes {
		t.Run(string(surface), func(t *testing.T) {
			before := time.Now().Add(-time.Millisecond)
			id := trace.New(surface)
			if want := prefix + "_" + id.Suffix(); string(id) != want {
				t.Errorf("New = %q, want %q", id, want)
			}
			if string(id[3:]) != strings.ToUpper(string(id[3:])) {
				t.Errorf("New = %q, want the ULID in upper case", id)
			}
			if id.Surface() != surface {
				t.Errorf("Surface = %q, want %q", id.Surface(), surface)
			}
			if made := id.Time(); made.Before(before) || made.After(time.Now()) || made.Location() != time.UTC {
				t.Errorf("Time = %v, want now in UTC", made)
			}
			parsed, err := trace.Parse(string(id))
			if err != nil || parsed != id {
				t.Errorf("Parse(%q) = %q, %v", id, parsed, err)
			}
		})
	}
}

func TestNewRefusesAnUnknownSurface(t *testing.T) {
	t.Parallel()
	defer func() {
		if recover() == nil {
			t.Error("New gave an id to a surface that does not exist")
		}
	}()
	trace.New("email")
}

// Two ids of one millisecond must not be neighbours: who knows one could guess the other.
func TestNewIsNotCountedUp(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seen := map[string]bool{}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 500 {
				random := hex.EncodeToString(trace.New(trace.Chat).ULID().Entropy()[:8])
				mu.Lock()
				if seen[random] {
					t.Errorf("the upper 64 random bits %s came twice", random)
				}
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
		if err != nil || id != good {
			t.Errorf("Parse(%q) = %q, %v, want %q", s, id, err, good)
		}
	}
}

func TestParseSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ in, says string }{
		"empty":        {"", "no surface prefix"},
		"bare ulid":    {suffix, "no surface prefix"},
		"no prefix":    {"_" + suffix, `prefix "" is not one of hb, op, ch, wh, fl`},
		"other prefix": {"xx_" + suffix, `prefix "xx" is not one of hb, op, ch, wh, fl`},
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
			if !errors.Is(err, trace.ErrInvalid) || id != "" {
				t.Fatalf("Parse(%q) = %q, %v, want ErrInvalid", c.in, id, err)
			}
			for _, want := range []string{c.says, "looks like " + string(good)} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
			if len(err.Error()) > 300 {
				t.Errorf("error has %d bytes", len(err.Error()))
			}
		})
	}
}

func TestParseAny(t *testing.T) {
	t.Parallel()
	all := []trace.ID{good, "op_" + suffix, "ch_" + suffix, "wh_" + suffix, "fl_" + suffix}
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
	} {
		t.Run(name, func(t *testing.T) {
			got, err := trace.ParseAny(c.in)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	for name, in := range map[string]string{
		"empty": "", "zero hex": strings.Repeat("0", 32), "not hex": strings.Repeat("g", 32),
		"31 digits": strings.Repeat("a", 31), "33 digits": strings.Repeat("a", 33),
		"zero ulid": strings.Repeat("0", 26), "bad ulid": strings.Repeat("U", 26),
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := trace.ParseAny(in); !errors.Is(err, trace.ErrInvalid) {
				t.Errorf("ParseAny(%q) = %v, %v, want ErrInvalid", in, got, err)
			}
		})
	}
}

func TestOTelIsTheSameSixteenBytes(t *testing.T) {
	t.Parallel()
	u := good.ULID()
	if got, want := good.OTel(), hex.EncodeToString(u[:]); got != want || len(got) != 32 {
		t.Errorf("OTel = %q, want %q", got, want)
	}
	if good.Suffix() != suffix {
		t.Errorf("Suffix = %q, want %q", good.Suffix(), suffix)
	}
}

func TestIDsSortByTime(t *testing.T) {
	t.Parallel()
	older, newer := good, trace.New(trace.Heartbeat)
	ids := []trace.ID{newer, older}
	slices.Sort(ids)
	if ids[0] != older || !older.Time().Before(newer.Time()) {
		t.Errorf("sorted: %v", ids)
	}
}

func TestMethodsOfAnInvalidID(t *testing.T) {
	t.Parallel()
	for _, id := range []trace.ID{"", "hb_", "xx_" + suffix, "hb-" + suffix, trace.ID(strings.ToLower(string(good)))} {
		if id.Valid() || id.Surface() != "" || id.Suffix() != "" || id.OTel() != "" || !id.Time().IsZero() || !id.ULID().IsZero() {
			t.Errorf("%q passes for a trace id", id)
		}
	}
	if !good.Valid() {
		t.Errorf("%q is not valid", good)
	}
}

func TestParseSurface(t *testing.T) {
	t.Parallel()
	for surface, prefix := range prefixes {
		for _, name := range []string{string(surface), prefix} {
			if got, err := trace.ParseSurface(name); err != nil || got != surface {
				t.Errorf("ParseSurface(%q) = %q, %v", name, got, err)
			}
		}
	}
	for _, name := range []string{"", "Heartbeat", "cron"} {
		_, err := trace.ParseSurface(name)
		if err == nil || !strings.Contains(err.Error(), "heartbeat, operate, chat, webhook, flow") {
			t.Errorf("ParseSurface(%q): %v", name, err)
		}
	}
}

func TestContext(t *testing.T) {
	t.Parallel()
	if span, ok := trace.From(t.Context()); ok || span != (trace.Span{}) {
		t.Errorf("From(empty) = %+v, %v", span, ok)
	}
	span := trace.Span{TraceID: good, ExecutionID: "e1", ActivityID: "a1", Lane: "heartbeat", Surface: trace.Heartbeat, Agent: "agent"}
	ctx := trace.With(t.Context(), span)
	child := trace.WithLane(trace.WithActivity(ctx, "a2"), "objective:7")

	if got, ok := trace.From(ctx); !ok || got != span {
		t.Errorf("From = %+v, %v, want %+v: a derived context changed its parent", got, ok, span)
	}
	want := span
	want.ActivityID, want.Lane = "a2", "objective:7"
	if got, ok := trace.From(child); !ok || got != want {
		t.Errorf("From(child) = %+v, %v, want %+v", got, ok, want)
	}
	if trace.IDFrom(child) != good || trace.IDFrom(t.Context()) != "" {
		t.Error("IDFrom does not give what From gives")
	}
	if got, ok := trace.From(trace.WithLane(t.Context(), "pipeline:prices")); ok || got.Lane != "pipeline:prices" {
		t.Errorf("lane without a trace: %+v, %v", got, ok)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{string(good), suffix, good.OTel(), "", "hb_", "HB_" + strings.ToLower(suffix), "wh_\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, err := trace.Parse(s)
		if err == nil {
			if !id.Valid() || !strings.EqualFold(string(id), s) {
				t.Errorf("Parse(%q) = %q", s, id)
			}
			if again, err := trace.Parse(string(id)); err != nil || again != id {
				t.Errorf("Parse(%q) = %q, %v: not stable", id, again, err)
			}
			if ids, err := trace.ParseAny(id.OTel()); err != nil || !slices.Contains(ids, id) {
				t.Errorf("ParseAny(%q) = %v, %v, want %q among them", id.OTel(), ids, err, id)
			}
		}
		ids, anyErr := trace.ParseAny(s)
		if err == nil && (anyErr != nil || !slices.Contains(ids, id)) {
			t.Errorf("ParseAny(%q) = %v, %v, Parse gives %q", s, ids, anyErr, id)
		}
		for _, id := range ids {
			if !id.Valid() {
				t.Errorf("ParseAny(%q) gives %q", s, id)
			}
		}
	})
}
