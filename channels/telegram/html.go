package telegram

import (
	"fmt"
	"html"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	extensions "github.com/yuin/goldmark/extension/ast"
	"github.com/yuin/goldmark/text"
	"github.com/yuin/goldmark/util"
)

// markdown parses the Markdown that models write: CommonMark with strikethrough, tables and bare links.
var markdown = goldmark.New(goldmark.WithExtensions(extension.Strikethrough, extension.Table, extension.Linkify))

// HTML converts Markdown to Telegram's HTML. It shows HTML in the Markdown as text.
func HTML(source string) string {
	raw := []byte(source)
	p := &printer{source: raw}
	p.blocks(markdown.Parser().Parse(text.NewReader(raw)), "\n\n")
	return strings.TrimSpace(p.out.String())
}

// printer writes the HTML of a document.
type printer struct {
	source []byte
	out    strings.Builder
}

// blocks writes the blocks below n with a separator between them.
func (p *printer) blocks(n ast.Node, separator string) {
	for c := n.FirstChild(); c != nil; c = c.NextSibling() {
		p.block(c)
		if c.NextSibling() != nil {
			p.out.WriteString(separator)
		}
	}
}

// block writes a block in the HTML subset of Telegram, which has no headings, rules, lists or tables.
func (p *printer) block(n ast.Node) {
	switch n := n.(type) {
	case *ast.Heading:
		p.within("b", n)
	case *ast.Blockquote:
		p.out.WriteString("<blockquote>")
		p.blocks(n, "\n\n")
		p.out.WriteString("</blockquote>")
	case *ast.FencedCodeBlock:
		language := string(n.Language(p.source))
		if language != "" {
			language = ` class="language-` + html.EscapeString(language) + `"`
		}
		p.out.WriteString("<pre><code" + language + ">" + html.EscapeString(p.lines(n)) + "</code></pre>")
	case *ast.CodeBlock:
		p.out.WriteString("<pre>" + html.EscapeString(p.lines(n)) + "</pre>")
	case *ast.HTMLBlock:
		if n.HasClosure() { // Lines lacks this line
			n.Lines().Append(n.ClosureLine)
		}
		p.out.WriteString(html.EscapeString(p.lines(n)))
	case *ast.ThematicBreak:
		p.out.WriteString("———")
	case *ast.List:
		p.list(n)
	case *extensions.Table:
		p.table(n)
	default:
		p.inline(n)
	}
}

// lines returns the text of a block of lines.
func (p *printer) lines(n ast.Node) string {
	var all strings.Builder
	for i := range n.Lines().Len() {
		at := n.Lines().At(i)
		all.Write(at.Value(p.source))
	}
	return strings.TrimRight(all.String(), "\n")
}

// list writes a list. Telegram has none, so items have a mark.
func (p *printer) list(n *ast.List) {
	number := n.Start
	for c := n.FirstChild(); c != nil; c = c.NextSibling() {
		mark := "• "
		if n.IsOrdered() {
			mark = fmt.Sprintf("%d. ", number)
			number++
		}
		item := &printer{source: p.source}
		item.blocks(c, "\n")
		p.out.WriteString(mark + indented(item.out.String()))
		if c.NextSibling() != nil {
			p.out.WriteString("\n")
		}
	}
}

// indented indents the lines of a list's item after its first one, except those inside of code.
func indented(item string) string {
	var out strings.Builder
	for i, line := range strings.Split(item, "\n") {
		if i > 0 {
			out.WriteString("\n")
			if written := out.String(); strings.Count(written, "<pre>") == strings.Count(written, "</pre>") {
				out.WriteString("   ")
			}
		}
		out.WriteString(line)
	}
	return out.String()
}

// table writes a table as preformatted text.
func (p *printer) table(n ast.Node) {
	p.out.WriteString("<pre>")
	for row := n.FirstChild(); row != nil; row = row.NextSibling() {
		var cells []string
		for cell := row.FirstChild(); cell != nil; cell = cell.NextSibling() {
			one := &printer{source: p.source}
			one.inline(cell)
			cells = append(cells, one.out.String())
		}
		p.out.WriteString(strings.Join(cells, " | "))
		if row.NextSibling() != nil {
			p.out.WriteString("\n")
		}
	}
	p.out.WriteString("</pre>")
}

// within writes the inline content of n in an element.
func (p *printer) within(element string, n ast.Node) {
	p.out.WriteString("<" + element + ">")
	p.inline(n)
	p.out.WriteString("</" + element + ">")
}

// inline writes the inline content of n.
func (p *printer) inline(n ast.Node) {
	for c := n.FirstChild(); c != nil; c = c.NextSibling() {
		switch c := c.(type) {
		case *ast.Text:
			p.text(c.Segment.Value(p.source), c.IsRaw())
			if c.SoftLineBreak() || c.HardLineBreak() {
				p.out.WriteString("\n")
			}
		case *ast.String:
			p.out.WriteString(html.EscapeString(string(c.Value)))
		case *ast.CodeSpan: // its text is raw
			p.within("code", c)
		case *ast.Emphasis:
			element := "i"
			if c.Level > 1 {
				element = "b"
			}
			p.within(element, c)
		case *extensions.Strikethrough:
			p.within("s", c)
		case *ast.Link:
			p.link(c.Destination, func() { p.inline(c) })
		case *ast.Image:
			p.link(c.Destination, func() { p.inline(c) })
		case *ast.AutoLink:
			p.out.WriteString(html.EscapeString(string(c.Label(p.source))))
		case *ast.RawHTML:
			for i := range c.Segments.Len() {
				at := c.Segments.At(i)
				p.out.WriteString(html.EscapeString(string(at.Value(p.source))))
			}
		default:
			p.inline(c)
		}
	}
}

// text writes a piece of text. Unless it is raw, backslash escapes and entities stand for their characters.
func (p *printer) text(piece []byte, raw bool) {
	if !raw {
		piece = unescaped(piece)
	}
	p.out.WriteString(html.EscapeString(string(piece)))
}

// unescaped resolves backslash escapes and entities, which the parser leaves to the printer.
func unescaped(piece []byte) []byte {
	return util.ResolveEntityNames(util.ResolveNumericReferences(util.UnescapePunctuations(piece)))
}

// link writes a link to a web page. Other destinations stay text.
func (p *printer) link(destination []byte, label func()) {
	to := string(unescaped(destination))
	if !strings.HasPrefix(to, "https://") && !strings.HasPrefix(to, "http://") {
		label()
		return
	}
	p.out.WriteString(`<a href="` + html.EscapeString(to) + `">`)
	label()
	p.out.WriteString("</a>")
}
