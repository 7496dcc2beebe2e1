package redact

// Known applies hide, which blots out secrets that the caller knows, to every text of a value that was decoded from JSON, keys
// included. Lists are changed in place. Keys that become the same under hide leave one of their values.
func Known(value any, hide func(string) string) any {
	switch v := value.(type) {
	case string:
		return hide(v)
	case []any:
		for i := range v {
			v[i] = Known(v[i], hide)
		}
	case map[string]any:
		hidden := make(map[string]any, len(v))
		for key := range v {
			hidden[hide(key)] = Known(v[key], hide)
		}
		return hidden
	}
	return value
}
