package activity

import (
	"encoding/json"
	"math"
)

// Usage is what a model call consumed, in tokens. UnknownTokens and UnknownUSD are the parts of TotalTokens and of
// the cost that the provider may bill but did not report: the worst case of requests without an answer, and the
// estimate of answers without usage. CachedTokens and CacheWriteTokens are parts of PromptTokens.
type Usage struct {
	PromptTokens     int     `json:"prompt_tokens"`
	CachedTokens     int     `json:"cached_tokens,omitempty"`
	CacheWriteTokens int     `json:"cache_write_tokens,omitempty"`
	CompletionTokens int     `json:"completion_tokens"`
	TotalTokens      int     `json:"total_tokens"`
	Estimated        bool    `json:"estimated,omitempty"`
	UnknownTokens    int     `json:"unknown_tokens,omitempty"`
	UnknownUSD       float64 `json:"unknown_usd,omitempty"`
}

// UnmarshalJSON reads the numbers as the SQL function agent_tokens does. Other programs write rows too, so a member of
// another type is 0, and no row breaks a listing.
func (u *Usage) UnmarshalJSON(raw []byte) error {
	members := members(raw)
	*u = Usage{
		PromptTokens: tokenCount(members["prompt_tokens"]), CachedTokens: tokenCount(members["cached_tokens"]),
		CacheWriteTokens: tokenCount(members["cache_write_tokens"]),
		CompletionTokens: tokenCount(members["completion_tokens"]),
		TotalTokens:      tokenCount(members["total_tokens"]), UnknownTokens: tokenCount(members["unknown_tokens"]),
		UnknownUSD: jsonNumber(members["unknown_usd"]), Estimated: string(members["estimated"]) == "true",
	}
	return nil
}

// Counts are numbers of calls by skill. Like those of Usage, a member of another type is 0.
type Counts map[string]int

// UnmarshalJSON reads the numbers.
func (c *Counts) UnmarshalJSON(raw []byte) error {
	*c = Counts{}
	for name, value := range members(raw) {
		(*c)[name] = tokenCount(value)
	}
	return nil
}

// members returns the members of an object; none for another value.
func members(raw []byte) (members map[string]json.RawMessage) {
	if json.Unmarshal(raw, &members) != nil {
		return nil
	}
	return members
}

// tokenCount returns a rounded number from 0 to 1e12.
func tokenCount(raw json.RawMessage) int {
	return int(math.Round(min(max(jsonNumber(raw), 0), 1e12)))
}

// jsonNumber returns a number; 0 for another value.
func jsonNumber(raw json.RawMessage) (n float64) {
	if json.Unmarshal(raw, &n) != nil {
		return 0
	}
	return n
}
