package trace_test

import (
	"context"
	"fmt"
	"strings"

	"github.com/lanekeeper/lanekeeper/trace"
)

func ExampleNew() {
	id := trace.New(trace.Heartbeat)
	fmt.Println(id[:3], len(id), id.Surface())
	// Output: hb_ 29 heartbeat
}

// Parse accepts lower case, and returns the id in its standard form.
func ExampleParse() {
	id, err := trace.Parse("hb_01jd3v7k8zq6w2m5t9x4c1b0ae")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(id)
	fmt.Println(id.OTel())
	fmt.Println(id.Time().Format("2006-01-02"))
	// Output:
	// hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE
	// 019347b3cd1fb9b82a1749e91815814e
	// 2024-11-20
}

func ExampleParse_invalid() {
	_, err := trace.Parse("01JD3V7K8ZQ6W2M5T9X4C1B0AE")
	fmt.Println(strings.Replace(err.Error(), "; ", ";\n", 1)) // on two lines
	// Output:
	// parse trace id "01JD3V7K8ZQ6W2M5T9X4C1B0AE": not a trace id: it has no surface prefix;
	// a trace id looks like hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE
}

// An id copied from a tracing tool names no surface, so ParseAny returns an id for each, for trace_id = any(ids).
func ExampleParseAny() {
	ids, err := trace.ParseAny("019347b3cd1fb9b82a1749e91815814e")
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, id := range ids {
		fmt.Println(id)
	}
	// Output:
	// hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE
	// op_01JD3V7K8ZQ6W2M5T9X4C1B0AE
	// ch_01JD3V7K8ZQ6W2M5T9X4C1B0AE
	// wh_01JD3V7K8ZQ6W2M5T9X4C1B0AE
	// fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE
	// ev_01JD3V7K8ZQ6W2M5T9X4C1B0AE
}

func ExampleFrom() {
	ctx := trace.With(context.Background(), trace.Span{TraceID: "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE", Agent: "agent"})
	span, ok := trace.From(ctx)
	fmt.Println(span.TraceID, span.Agent, ok)
	// Output: hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE agent true
}
