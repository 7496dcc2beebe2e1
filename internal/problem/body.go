package problem

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// Stray is the first field of a JSON object that is none of the struct's that into points to; empty when all are. A
// decoder that refuses unknown fields lets one through whose name differs in the case of its letters alone.
func Stray(raw []byte, into any) (string, error) {
	var said map[string]json.RawMessage
	if err := json.Unmarshal(raw, &said); err != nil {
		return "", err
	}
	for _, f := range reflect.VisibleFields(reflect.TypeOf(into).Elem()) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		delete(said, name)
	}
	left := append(slices.Sorted(maps.Keys(said)), "")
	return left[0], nil
}
