package chat

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
)

// namesIn lists the JSON names of a struct's fields.
func namesIn(t reflect.Type) (names []string) {
	for f := range t.Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
			names = append(names, name)
		} else if f.Type.Kind() == reflect.Struct && f.Anonymous && !strings.Contains(f.Type.PkgPath(), "openai-go") {
			names = append(names, namesIn(f.Type)...)
		}
	}
	return names
}

func TestEveryDocumentedParameterIsHonouredRefusedOrTheAgents(t *testing.T) {
	t.Parallel()
	known := slices.Concat(namesIn(reflect.TypeFor[request]()), agentParameters())
	documented := namesIn(reflect.TypeFor[openai.ChatCompletionNewParams]())
	if len(documented) < 30 {
		t.Fatalf("the library documents %v", documented)
	}
	for _, name := range documented {
		if !slices.Contains(known, name) {
			t.Errorf("nobody has decided about %s", name)
		}
	}
}
