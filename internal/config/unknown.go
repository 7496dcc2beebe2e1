package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/nearest"
)

// unknown warns of each AGENT_ variable that is none of ours.
func unknown(environ map[string]string, list []Setting, also []string) []string {
	known := slices.Clone(also)
	for _, s := range list {
		known = append(known, s.Name)
		if s.Secret {
			known = append(known, s.Name+fileSuffix)
		}
	}
	var warnings []string
	for _, name := range slices.Sorted(maps.Keys(environ)) {
		if !strings.HasPrefix(name, "AGENT_") || slices.Contains(known, name) {
			continue
		}
		warning := name + " is not a setting"
		if near := nearest.To(name, known); near != "" {
			warning = fmt.Sprintf("%s; did you mean %s?", warning, near)
		}
		warnings = append(warnings, warning)
	}
	return warnings
}
