package workspace

import (
	"fmt"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/nearest"
)

// longestName is how much of a name is shown.
const longestName = 80

// unknown says that name is none of known, and which it may have meant. what is the sort of name, and
// shown is how the name is written in the message.
func unknown(what, shown, name string, known []string) string {
	known = slices.DeleteFunc(slices.Clone(known), func(k string) bool { return k == "" || k == "-" })
	if len(shown) > longestName {
		shown = strings.ToValidUTF8(shown[:longestName], "") + "…"
	}
	if near := hint(name, known); near != "" {
		return fmt.Sprintf("unknown %s %q%s", what, shown, near)
	}
	slices.Sort(known)
	return fmt.Sprintf("unknown %s %q; known are %s", what, shown, strings.Join(known, ", "))
}

// hint asks whether the nearest of known was meant; nothing when none is near.
func hint(name string, known []string) string {
	if near := nearest.To(name, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	return ""
}
