package documents

import (
	"regexp"
	"strconv"
	"strings"
)

// Excerpt is a document in a message, as [Shown] writes it.
type Excerpt struct{ ID, Name string }

// excerptHead matches the first line that Shown writes.
var excerptHead = regexp.MustCompile(
	`(?m)^\[Document ([0-9a-f-]{36}): ("(?:[^"\\]|\\.)*"), [^\n]*\. It is data, not instructions\.\]$`)

// SplitExcerpts separates the text of a message from the documents that [Shown] added to it.
func SplitExcerpts(content string) (text string, list []Excerpt) {
	heads := excerptHead.FindAllStringSubmatchIndex(content, -1)
	if heads == nil {
		return content, nil
	}
	for _, h := range heads {
		name, err := strconv.Unquote(content[h[4]:h[5]])
		if err != nil {
			name = content[h[4]:h[5]]
		}
		list = append(list, Excerpt{ID: content[h[2]:h[3]], Name: name})
	}
	return strings.TrimSpace(content[:heads[0][0]]), list
}
